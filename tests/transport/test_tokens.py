"""Tokens over every front: who is answered, who is told 401 and who 403."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from neptrio.service.tokens import digest
from neptrio.transport.grpc.service import servicers
from neptrio.transport.header_policy import (
    METHOD_CATEGORIES,
    METHOD_SCOPES,
    MODEL_FIELDS,
    OF_NO_MODEL,
    VERB_CATEGORIES,
    VERB_SCOPES,
)
from tests.support.http import Http1, Http2, Reply
from tests.support.infer_messages import IDENTITY_JSON, identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

INFER = "/v2/models/simple/infer"
BODY = IDENTITY_JSON
KINDS = ["lean", "hypercorn", "http2"]


def row(name: str, *scopes: str, models: str = "") -> str:
    """The lines of a token that is its own name."""
    kept = digest(name.encode()).hex()
    return f'[[token]]\nname = "{name}"\nhash = "sha256:{kept}"\nscopes = {json.dumps(scopes)}\n{models}\n'


FILE = (
    row("infer", "infer")
    + row("read", "read")
    + row("operate", "operate")
    + row("admin", "admin")
    + row("other", "infer", "read", "operate", "admin", models='models = ["other"]')
    + row("alias", "infer", "admin", models='models = ["beside"]')
    + row("all", "infer", "read", "operate", "admin")
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity_config())
    write_model(folder, "other", identity_config())
    return folder


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("auth") / "auth.toml"
    file.write_text(FILE)
    lean = ["--http-lean=false"] if request.param == "hypercorn" else []
    flags = ["--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true", *lean]
    with ServerProcess(repository, f"--auth-config={file}", *flags) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Http1 | Http2]:
    kind = Http2 if request.node.callspec.params["server"] == "http2" else Http1
    with kind(server.http) as made:
        yield made


def ask(client: Http1 | Http2, token: str | None, method: str, path: str, body: bytes = b"") -> Reply:
    return client.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})


VERBS: list[tuple[str, str, bytes, str]] = [
    ("POST", INFER, BODY, "infer"),
    ("POST", "/v2/models/simple/generate", b"{}", "infer"),
    ("GET", "/v2", b"", "read"),
    ("GET", "/v2/models/simple", b"", "read"),
    ("GET", "/v2/models/simple/config", b"", "read"),
    ("GET", "/v2/models/simple/stats", b"", "read"),
    ("GET", "/v2/models/stats", b"", "read"),
    ("POST", "/v2/repository/index", b"", "read"),
    ("GET", "/v2/logging", b"", "read"),
    ("GET", "/v2/trace/setting", b"", "read"),
    ("GET", "/v2/systemsharedmemory/status", b"", "read"),
    ("POST", "/v2/logging", b"{}", "operate"),
    ("POST", "/v2/trace/setting", b"{}", "operate"),
    ("GET", "/v2/trace/recent", b"", "operate"),
    ("GET", "/v2/errors", b"", "operate"),
    ("GET", "/v2/models/simple/errors", b"", "operate"),
    ("GET", "/v2/logging/recent", b"", "operate"),
    ("POST", "/v2/systemsharedmemory/unregister", b"", "operate"),
    ("POST", "/v2/models/simple/sequences/1/end", b"", "operate"),
    ("POST", "/v2/repository/models/simple/load", b"", "admin"),
    ("POST", "/v2/repository/models/simple/check", b"{}", "admin"),
    ("GET", "/v2/models/simple/labels", b"", "read"),
    ("POST", "/v2/models/simple/labels", b"{}", "admin"),
]


@pytest.mark.parametrize(("method", "path", "body", "scope"), VERBS, ids=[f"{v[0]}-{v[1]}" for v in VERBS])
def test_every_verb_wants_its_scope(
    client: Http1 | Http2, method: str, path: str, body: bytes, scope: str
) -> None:
    for token in ("infer", "read", "operate", "admin"):
        reply = ask(client, token, method, path, body)
        if token == scope:
            assert reply.status in (200, 400), reply.body  # 400: of the verb itself
            assert b"token" not in reply.body
        else:
            assert reply.status == 403
            assert f"token '{token}' may not do this: it needs the scope {scope}" in reply.body.decode()
    for wrong in (None, "wrong"):
        reply = ask(client, wrong, method, path, body)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "token" in json.loads(reply.body)["error"]
    if path != "/v2":
        assert ask(client, "other", method, path, body).status == 403


def test_a_token_for_one_model_is_for_nothing_else(client: Http1 | Http2) -> None:
    assert ask(client, "other", "POST", "/v2/models/other/infer", BODY).status == 200
    assert ask(client, "other", "POST", "/v2/models/other/versions/1/infer", BODY).status == 200
    assert ask(client, "other", "GET", "/v2/models/other").status == 200
    assert ask(client, "other", "GET", "/v2").status == 200
    assert ask(client, "other", "POST", "/v2/repository/models/other/load").status == 200
    assert ask(client, "other", "POST", "/v2/models/other/trace/setting", b"{}").status == 200
    assert "limited" in ask(client, "other", "POST", "/v2/trace/setting", b"{}").body.decode()
    labels = "/v2/models/other/labels"
    assert ask(client, "other", "POST", labels, b'{"labels": {"stable": 1}}').status == 200
    assert ask(client, "other", "POST", "/v2/models/other/versions/stable/infer", BODY).status == 200
    refused = ask(client, "other", "POST", "/v2/models/other/versions/nowhere/infer", BODY)
    assert refused.status == 404 and b"stable" not in refused.body, (
        "clients with tokens are not told what there is"
    )
    assert ask(client, "other", "POST", labels, b'{"aliases": {"mine": true}}').status == 403
    # nobody learns which models there are
    assert ask(client, "other", "GET", "/v2/models/nowhere").status == 403


def with_alias(config: dict[str, Any], alias: str) -> str:
    return json.dumps({**config, "parameters": {"aliases": {"string_value": alias}}})


def test_a_token_for_one_model_takes_no_name_of_others(client: Http1 | Http2) -> None:
    """Neither by a load with a configuration: requests for that name would be answered by a model of its choice. What
    somebody else has given the model, it may keep."""
    config = json.loads(ask(client, "all", "GET", "/v2/models/other/config").body)

    def load(token: str, text: str) -> Reply:
        body = json.dumps({"parameters": {"config": text}}).encode()
        return ask(client, token, "POST", "/v2/repository/models/other/load", body)

    refused = load("other", with_alias(config, "elsewhere"))
    assert refused.status == 403
    assert "token 'other' is limited to some models: it is not for model 'elsewhere'" in refused.body.decode()
    assert ask(client, "all", "GET", "/v2/models/elsewhere").status == 404
    assert load("all", with_alias(config, "elsewhere")).status == 200
    assert load("other", with_alias({**config, "default_model_filename": "x"}, "elsewhere")).status == 200
    assert json.loads(ask(client, "all", "GET", "/v2/models/elsewhere").body)["name"] == "other"
    assert load("other", json.dumps(config)).status == 200
    # and it asks no other model by way of an ensemble
    tensors = {
        side: {tensor["name"]: tensor["name"] for tensor in config[side]} for side in ("input", "output")
    }
    step = {
        "model_name": "simple",
        "model_version": -1,
        "input_map": tensors["input"],
        "output_map": tensors["output"],
    }
    around = {key: config[key] for key in ("input", "output", "max_batch_size") if key in config}
    around |= {"name": "other", "platform": "ensemble", "ensemble_scheduling": {"step": [step]}}
    refused = load("other", json.dumps(around))
    assert refused.status == 403 and "it is not for model 'simple'" in refused.body.decode()
    assert load("all", json.dumps(around)).status == 200
    assert (
        load("other", json.dumps({**around, "version_policy": {"latest": {"num_versions": 1}}})).status == 200
    )
    assert load("all", json.dumps(config)).status == 200


def test_an_alias_gives_no_say_over_the_model_behind_it(client: Http1 | Http2) -> None:
    """Whoever may use an alias asks the model by that name, and moves none of its labels."""
    own, alias = "/v2/models/simple/labels", "/v2/models/beside/labels"
    assert (
        ask(client, "all", "POST", own, b'{"aliases": {"beside": true}, "labels": {"old": 1}}').status == 200
    )
    assert ask(client, "alias", "POST", "/v2/models/beside/infer", BODY).status == 200
    refused = ask(client, "alias", "POST", alias, b'{"labels": {"stable": 1, "old": null}}')
    assert refused.status == 403
    assert "token 'alias' is limited to some models: it is not for model 'simple'" in refused.body.decode()
    assert json.loads(ask(client, "all", "GET", own).body)["labels"] == {"old": 1}
    assert (
        ask(client, "all", "POST", alias, b'{"aliases": {"beside": null}, "labels": {"old": null}}').status
        == 200
    )


def test_probes_need_no_token(client: Http1 | Http2, server: ServerProcess) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready"):
        assert client.request("GET", path).status == 200
    triton = triton_grpc.InferenceServerClient(server.grpc)
    assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready("simple")
    triton.close()


@pytest.mark.parametrize("value", ["Basic YTpi", "Bearer", "Bearer ", "npt_x"])
def test_another_scheme_is_refused(client: Http1 | Http2, value: str) -> None:
    reply = client.request("GET", "/v2", b"", {"Authorization": value})
    assert reply.status == 401
    assert "Bearer TOKEN" in json.loads(reply.body)["error"]


def test_metrics_want_a_token_that_may_read(server: ServerProcess) -> None:
    with Http1(server.metrics) as client:
        assert ask(client, "read", "GET", "/metrics").status == 200
        for token, status in ((None, 401), ("wrong", 401), ("infer", 403), ("other", 403)):
            reply = ask(client, token, "GET", "/metrics")
            assert reply.status == status
            assert b"nv_" not in reply.body


# ---------------------------------------------------------------- gRPC


def auth(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def triton(server: ServerProcess) -> Iterator[Any]:
    client = triton_grpc.InferenceServerClient(server.grpc)
    yield client
    client.close()


def test_grpc_calls_want_their_scope(triton: Any) -> None:
    calls: list[tuple[str, Any]] = [
        ("infer", lambda h: triton.infer("simple", identity_inputs(triton_grpc), headers=h)),
        (
            "infer",
            lambda h: triton.infer(
                "simple", identity_inputs(triton_grpc), headers=h, compression_algorithm="gzip"
            ),
        ),
        ("read", lambda h: triton.get_model_metadata("simple", headers=h)),
        ("read", lambda h: triton.get_model_config("simple", headers=h)),
        ("read", lambda h: triton.get_inference_statistics(headers=h)),
        ("read", lambda h: triton.get_model_repository_index(headers=h)),
        ("read", lambda h: triton.get_log_settings(headers=h)),
        ("read", lambda h: triton.get_trace_settings(headers=h)),
        ("operate", lambda h: triton.update_log_settings({"log_verbose_level": 0}, headers=h)),
        ("operate", lambda h: triton.update_trace_settings(None, {"trace_rate": "7"}, headers=h)),
        ("operate", lambda h: triton.unregister_system_shared_memory(headers=h)),
        ("admin", lambda h: triton.load_model("simple", headers=h)),
    ]
    for scope, call in calls:
        call(auth(scope))
        call(auth("all"))
        for other in {"infer", "read", "operate", "admin"} - {scope}:
            with pytest.raises(InferenceServerException, match="may not do this") as error:
                call(auth(other))
            assert error.value.status() == "StatusCode.PERMISSION_DENIED"
        with pytest.raises(InferenceServerException, match="limited to some models") as error:
            call(auth("other"))
        assert error.value.status() == "StatusCode.PERMISSION_DENIED"
        for headers in (None, auth("wrong")):
            with pytest.raises(InferenceServerException, match="token") as error:
                call(headers)
            assert error.value.status() == "StatusCode.UNAUTHENTICATED"


def test_a_grpc_token_for_one_model_is_for_that_alone(triton: Any) -> None:
    assert triton.infer("other", identity_inputs(triton_grpc), headers=auth("other")) is not None
    assert triton.get_model_metadata("other", headers=auth("other")).name == "other"
    triton.get_server_metadata(headers=auth("other"))
    triton.load_model("other", headers=auth("other"))
    config = triton.get_model_config("other", headers=auth("other"), as_json=True)["config"]
    with pytest.raises(InferenceServerException, match="it is not for model 'elsewhere'") as error:
        triton.load_model("other", headers=auth("other"), config=with_alias(config, "elsewhere"))
    assert error.value.status() == "StatusCode.PERMISSION_DENIED"


def test_every_message_of_a_stream_is_looked_at(triton: Any) -> None:
    with Answers(triton, headers=auth("other")) as answers:
        for model, refused in (("other", False), ("simple", True), ("other", False)):
            triton.async_stream_infer(model, identity_inputs(triton_grpc))
            assert ("limited to some models" in str(answers.next())) is refused
    with Answers(triton) as answers:
        assert "a token is needed" in str(answers.error())


def test_reflection_wants_a_token(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda raw: raw,
            response_deserializer=lambda raw: raw,
        )
        question = b"\x3a\x01*"  # list_services = 7
        with pytest.raises(grpc.RpcError) as error:
            next(call(iter([question])))
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert b"GRPCInferenceService" in next(
            call(iter([question]), metadata=[("authorization", "Bearer read")])
        )


def test_the_clients_of_tritonclient_send_tokens(server: ServerProcess) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        assert client.infer("simple", identity_inputs(triton_http), headers={"Authorization": "Bearer infer"})
        with pytest.raises(InferenceServerException, match="a token is needed"):
            client.infer("simple", identity_inputs(triton_http))


@pytest.mark.slow
def test_a_changed_file_holds_without_a_restart(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    file.write_text(row("old", "infer"))
    with ServerProcess(repository, f"--auth-config={file}") as server, Http1(server.http) as client:
        assert ask(client, "old", "POST", INFER, BODY).status == 200
        (tmp_path / "new").write_text(row("new", "infer") + "[anonymous]\nscopes = ['read']\n")
        (tmp_path / "new").replace(file)
        server.until_logged("there are 1 tokens now")
        assert ask(client, "old", "POST", INFER, BODY).status == 401
        assert ask(client, "new", "POST", INFER, BODY).status == 200
        assert ask(client, None, "GET", "/v2").status == 200
        assert ask(client, None, "POST", INFER, BODY).status == 403
        file.write_text("nonsense")
        server.until_logged("what it said before holds")
        assert ask(client, "new", "POST", INFER, BODY).status == 200


@pytest.mark.slow
def test_probes_that_are_closed_too(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    file.write_text("open_health = false\n" + row("read", "read"))
    with ServerProcess(repository, f"--auth-config={file}") as server:
        with Http1(server.http) as client, grpc.insecure_channel(server.grpc) as channel:
            assert client.request("GET", "/v2/health/live").status == 401
            assert ask(client, "read", "GET", "/v2/health/live").status == 200
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = service_pb2.ModelReadyRequest(name="simple")
            with pytest.raises(grpc.RpcError) as error:
                stub.ModelReady(request)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert stub.ModelReady(request, metadata=[("authorization", "Bearer read")]).ready


def test_a_file_that_cannot_be_used_ends_the_start(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"--auth-config: '.*none' cannot be read"):
        ServerProcess(repository, f"--auth-config={tmp_path}/none")


def test_every_verb_and_call_has_a_place() -> None:
    assert set(VERB_SCOPES) <= set(VERB_CATEGORIES)
    methods = {path.rpartition("/")[2] for path in METHOD_CATEGORIES}
    offered = {
        path.rpartition("/")[2] for servicer in servicers(None, None) for path in servicer.__mapping__()
    }  # type: ignore[arg-type]
    assert set(METHOD_SCOPES) <= methods
    assert set(MODEL_FIELDS) | set(OF_NO_MODEL) <= methods | offered
