"""Restricted endpoints and forwarded headers: every front, both HTTP/2 sessions, real clients."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from neptrio.errors import TritonError
from neptrio.transport.grpc.service import servicers
from neptrio.transport.header_policy import METHOD_CATEGORIES, VERB_CATEGORIES, HeaderForward
from neptrio.transport.rest.routes import TABLE
from tests.backends.python.models import config, python_model
from tests.support.http import Http1, Http2
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.transport.conftest import SESSIONS

PARAMETERS = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([r.parameters().encode()], dtype=object))]
            )
            for r in requests
        ]
"""
BLS = """
import json
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            inner = pb_utils.InferenceRequest(
                model_name="parameters",
                requested_output_names=["OUT"],
                inputs=r.inputs(),
                parameters=json.loads(r.parameters()),
            ).exec()
            answers.append(pb_utils.InferenceResponse(inner.output_tensors(), inner.error()))
        return answers
"""
TENSORS = config("IN:TYPE_INT32:1", "OUT:TYPE_STRING:1")
STREAMING = TENSORS + " model_transaction_policy { decoupled: true }"
DECOUPLED = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            out = pb_utils.Tensor("OUT", np.array([r.parameters().encode()], dtype=object))
            r.get_response_sender().send(
                pb_utils.InferenceResponse([out]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
"""
INPUTS = [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]
BODY = json.dumps({"inputs": INPUTS, "parameters": {"kept": 7}}).encode()
BOTH = json.dumps({"inputs": INPUTS, "parameters": {"my-both": "body", "kept": 7}}).encode()
INFER = "/v2/models/parameters/infer"
CATEGORIES = "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"
FORWARD = (
    "--http-header-forward-pattern=^my-|^priority$|^sequence_|^triton_",
    "--grpc-header-forward-pattern=^my-|^priority$|^triton_",
)
RESTRICT = (
    f"--http-restricted-api={CATEGORIES}:Admin-Key=a=b:c",
    "--grpc-restricted-protocol=health,metadata,statistics,inference:Key=val",
    "--grpc-restricted-protocol=logging:k2=v",
)
FRONTS = ["lean", "hypercorn", "http2"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header-models")
    python_model(folder, "parameters", PARAMETERS, TENSORS)
    isolated = 'parameters { key: "isolation" value { string_value: "process" } }'
    python_model(folder, "isolated", PARAMETERS, TENSORS + isolated)
    python_model(folder, "bls", BLS, TENSORS)
    python_model(folder, "decoupled", DECOUPLED, STREAMING)
    return folder


Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def start(repository: Path) -> Iterator[Start]:
    """Servers by their flags and HTTP/2 session, started once."""
    started: dict[tuple[str, ...], ServerProcess] = {}

    def server(*flags: str, session: str = SESSIONS[-1]) -> ServerProcess:
        key = (session, *flags)
        if key not in started:
            environment = {**os.environ, "NEPTRIO_HTTP2_SESSION": session}
            started[key] = ServerProcess(repository, *flags, env=environment)
        return started[key]

    yield server
    for process in started.values():
        process.stop()


@pytest.fixture(params=SESSIONS)
def forwarding(start: Start, request: pytest.FixtureRequest) -> ServerProcess:
    return start(*FORWARD, session=request.param)


@pytest.fixture(params=SESSIONS)
def restricted(start: Start, request: pytest.FixtureRequest) -> ServerProcess:
    return start(*RESTRICT, session=request.param)


def connect(front: str, start: Start, flags: tuple[str, ...]) -> Http1 | Http2:
    """A connection to a front of a server with these flags; hypercorn's own server has all of them."""
    if front == "hypercorn":
        return Http1(start(*FORWARD, RESTRICT[0], "--http-lean=false").http)
    return Http2(start(*flags).http) if front == "http2" else Http1(start(*flags).http)


def seen(body: bytes) -> dict[str, Any]:
    """The parameters that the model saw."""
    found: dict[str, Any] = json.loads(json.loads(body)["outputs"][0]["data"][0])
    return found


def tensor(module: Any) -> Any:
    made = module.InferInput("IN", [1], "INT32")
    made.set_data_from_numpy(np.array([1], np.int32))
    return made


# ---------------------------------------------------------------- forwarding over HTTP


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_http_headers_become_parameters(front: str, start: Start) -> None:
    with connect(front, start, FORWARD) as client:
        headers = {"MY-Tenant": "a b", "my-both": "header", "other": "x", "Admin-Key": "a=b:c"}
        reply = client.request("POST", INFER, BOTH, headers)
        assert reply.status == 200, reply.body
        name = "my-tenant" if front == "http2" else "MY-Tenant"
        assert seen(reply.body) == {"my-both": "header", "kept": 7, name: "a b"}
        # the next request of the connection has headers of its own
        reply = client.request("POST", INFER, BODY, {"Admin-Key": "a=b:c"})
        assert seen(reply.body) == {"kept": 7}


@pytest.mark.parametrize("front", FRONTS)
def test_a_body_cannot_bring_what_looks_like_a_header(front: str, start: Start) -> None:
    admin = {"Admin-Key": "a=b:c"}
    with connect(front, start, FORWARD) as client:
        for headers in (admin, {**admin, "my-tenant": "t"}):
            reply = client.request("POST", INFER, BOTH, headers)
            assert reply.status == 400
            assert "parameter 'my-both' has the name of a header" in json.loads(reply.body)["error"]
        reply = client.request("POST", "/v2/models/parameters/generate", b'{"IN":[1],"My-n":2}', admin)
        assert reply.status == 400
        assert "parameter 'My-n'" in json.loads(reply.body)["error"]
        # what cannot be forwarded cannot be forged either
        body = json.dumps({"inputs": INPUTS, "parameters": {"priority": 0, "kept": 7}}).encode()
        assert client.request("POST", INFER, body, admin).status == 200


def test_a_grpc_message_cannot_bring_what_looks_like_metadata(forwarding: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        with pytest.raises(InferenceServerException, match="parameter 'my-both'") as error:
            client.infer("parameters", [tensor(triton_grpc)], parameters={"my-both": "body"})
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
        with Answers(client) as answers:
            client.async_stream_infer("decoupled", [tensor(triton_grpc)], parameters={"my-both": "body"})
            assert "parameter 'my-both'" in str(answers.error())


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("model", ["bls", "isolated"])
def test_every_kind_of_python_model_sees_them(model: str, front: str, start: Start) -> None:
    with connect(front, start, FORWARD) as client:
        headers = {
            "my-tenant": "é".encode().decode("latin-1") if front != "http2" else "é",
            "Admin-Key": "a=b:c",
        }
        reply = client.request("POST", f"/v2/models/{model}/infer", BODY, headers)
        assert seen(reply.body) == {"kept": 7, "my-tenant": "é"}


@pytest.mark.parametrize("front", FRONTS)
def test_generate_forwards_too(front: str, start: Start) -> None:
    headers = {"my-tenant": "t", "Admin-Key": "a=b:c"}
    with connect(front, start, FORWARD) as client:
        reply = client.request("POST", "/v2/models/parameters/generate", b'{"IN":[1],"n":2}', headers)
        assert json.loads(json.loads(reply.body)["OUT"]) == {"n": 2, "my-tenant": "t"}
        reply = client.request("POST", "/v2/models/decoupled/generate_stream", b'{"IN":[1]}', headers)
        event = reply.body.removeprefix(b"data: ").strip()
        assert json.loads(json.loads(event)["OUT"]) == {"my-tenant": "t"}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", ["priority", "Sequence_Id", "triton_final_response"])
def test_reserved_headers_are_refused(name: str, front: str, start: Start) -> None:
    with connect(front, start, FORWARD) as client:
        reply = client.request("POST", INFER, BODY, {name: "1", "Admin-Key": "a=b:c"})
        shown = name.lower() if front == "http2" else name
        text = f"Header '{shown}' is reserved for Triton usage and cannot be forwarded."
        assert (reply.status, json.loads(reply.body)) == (400, {"error": text})
        assert client.request("POST", INFER, BODY, {"Admin-Key": "a=b:c"}).status == 200


def test_the_http_client(forwarding: ServerProcess) -> None:
    with triton_http.InferenceServerClient(forwarding.http) as client:
        answer = client.infer(
            "parameters",
            [tensor(triton_http)],
            headers={"my-tenant": "t"},
            parameters={"mine": "body"},
            request_compression_algorithm="gzip",
        )
        assert json.loads(answer.as_numpy("OUT")[0]) == {"mine": "body", "my-tenant": "t"}


# ---------------------------------------------------------------- forwarding over gRPC


def test_grpc_metadata_becomes_parameters(forwarding: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        for model in ("parameters", "bls", "isolated"):
            headers = {"my-tenant": "t", "my-both": "header", "my-some-bin": "é".encode(), "other": "x"}
            answer = client.infer(
                model, [tensor(triton_grpc)], headers=headers, parameters={"my-both": "body", "kept": 7}
            )
            expected = {"my-both": "header", "kept": 7, "my-tenant": "t", "my-some-bin": "é"}
            assert json.loads(answer.as_numpy("OUT")[0]) == expected
        answer = client.infer("parameters", [tensor(triton_grpc)])
        assert json.loads(answer.as_numpy("OUT")[0]) == {}


@pytest.mark.parametrize("value", [" b ", "b  ", " ", ""])
def test_spaces_around_a_metadata_value_are_kept(forwarding: ServerProcess, value: str) -> None:
    """A Triton server takes and forwards them, though RFC 9113 (8.2.1) calls such a value malformed."""
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        headers = {"my-tenant": value, "other": value}
        assert client.is_server_live(headers=headers)
        answer = client.infer("parameters", [tensor(triton_grpc)], headers=headers)
        assert json.loads(answer.as_numpy("OUT")[0]) == {"my-tenant": value}
        with Answers(client, headers=headers) as answers:
            client.async_stream_infer("parameters", [tensor(triton_grpc)])
            assert json.loads(answers.result().as_numpy("OUT")[0]) == {"my-tenant": value}


@pytest.mark.parametrize("route", ["infer", "generate"])
@pytest.mark.parametrize("value", ["b  ", "b\t", "a  b"])
def test_blanks_behind_a_header_are_kept(forwarding: ServerProcess, route: str, value: str) -> None:
    """For models. What the server reads itself has none of them."""
    body = json.dumps({"inputs": INPUTS} if route == "infer" else {"IN": 1}).encode()
    with Http1(forwarding.http) as http:
        head = f"POST /v2/models/parameters/{route} HTTP/1.1\r\nHost: x  \r\nmy-tenant: {value}\r\n"
        http.send(f"{head}Content-Length: {len(body)}  \r\n\r\n".encode() + body)
        reply = http.read()
    assert reply.status == 200, reply.body
    answer = json.loads(reply.body)
    text = answer["outputs"][0]["data"][0] if route == "infer" else answer["OUT"]
    assert json.loads(text)["my-tenant"] == value


def test_a_stream_forwards_with_every_request(forwarding: ServerProcess) -> None:
    with (
        triton_grpc.InferenceServerClient(forwarding.grpc) as client,
        Answers(client, headers={"my-tenant": "t"}) as answers,
    ):
        for model in ("parameters", "decoupled"):
            for number in range(2):
                client.async_stream_infer(model, [tensor(triton_grpc)], parameters={"n": number})
                result = answers.result()
                found = json.loads(result.as_numpy("OUT")[0])
                assert found == {"n": number, "my-tenant": "t"}


def test_reserved_metadata_is_refused(forwarding: ServerProcess) -> None:
    text = "Header 'priority' is reserved for Triton usage and cannot be forwarded."
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        with pytest.raises(InferenceServerException) as info:
            client.infer("parameters", [tensor(triton_grpc)], headers={"priority": "1"})
        assert info.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert info.value.message() == text
        with Answers(client, headers={"priority": "1"}) as answers:
            client.async_stream_infer("parameters", [tensor(triton_grpc)])
            assert answers.error().message() == text


def test_metadata_for_the_server_itself_is_not_forwarded(forwarding: ServerProcess) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"}
        )
        client.async_stream_infer("parameters", [tensor(triton_grpc)])
        result, error = answers.get(timeout=60)
        assert error is None and json.loads(result.as_numpy("OUT")[0]) == {}
        client.stop_stream()


def test_patterns() -> None:
    def names(pattern: str, *headers: str) -> list[str]:
        return list(HeaderForward(pattern).headers((name.encode(), b"") for name in headers))

    assert names("(PREFIX_.*)", "prefix_a", "PREFIX_b", "x", "xprefix_") == [
        "prefix_a",
        "PREFIX_b",
        "xprefix_",
    ]
    assert names("(?-i)(PREFIX_.*)", "prefix_a", "PREFIX_b") == ["PREFIX_b"]
    assert names(r"^a\z", "a", "ab") == ["a"]
    assert names("(?i)(?s)a", "A") == ["A"]
    forward = HeaderForward(".*")
    assert forward.headers([(b":path", b"/"), (b"a", b"1"), (b"a", b"2"), (b"b", b"\xff")]) == {
        "a": "2",
        "b": "ÿ",
    }
    assert forward.metadata([(b"grpc-timeout", b"1S"), (b"te", b"trailers"), (b"user-agent", b"u")]) == {
        "user-agent": "u"
    }
    with pytest.raises(TritonError, match="'a-bin' is not base64"):
        forward.metadata([(b"a-bin", b"!x")])


LONG = "my-" + "x" * 1000


@pytest.mark.parametrize("front", FRONTS)
def test_long_names_match_as_short_ones(front: str, start: Start) -> None:
    with connect(front, start, FORWARD) as client:
        reply = client.request("POST", INFER, BODY, {LONG: "there", "Admin-Key": "a=b:c"})
        assert reply.status == 200, reply.body
        assert seen(reply.body) == {"kept": 7, LONG: "there"}


def test_long_metadata_matches_as_short_metadata(forwarding: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(forwarding.grpc) as client:
        answer = client.infer("parameters", [tensor(triton_grpc)], headers={LONG: "there"})
        assert json.loads(answer.as_numpy("OUT")[0]) == {LONG: "there"}


@pytest.mark.parametrize("pattern", [r"^x-(a+)+$", "(a?){30}b", "(ab|abab)*c", ".*a.*b.*"])
def test_patterns_that_trial_and_error_would_take_years_for(pattern: str) -> None:
    """RE2 matches in linear time: this test would not come to its end otherwise."""
    assert HeaderForward(pattern).headers([(b"x-" + b"a" * 4000 + b"!", b"v")]) == {}


def test_unknown_names_do_not_grow_memory() -> None:
    forward = HeaderForward("^my-")
    for number in range(5000):
        assert forward.headers([(b"my-%d" % number, b"v")]) == {f"my-{number}": "v"}
    assert len(forward._known) <= 1024


# ---------------------------------------------------------------- restrictions

PATHS = [
    ("GET", "/v2/health/live", 200),
    ("GET", "/v2/health/ready", 200),
    ("GET", "/v2/models/parameters/ready", 200),
    ("GET", "/v2", 200),
    ("GET", "/v2/models/parameters", 200),
    ("GET", "/v2/models/parameters/config", 200),
    ("GET", "/v2/models/stats", 200),
    ("GET", "/v2/trace/setting", 200),
    ("GET", "/v2/logging", 200),
    ("GET", "/v2/systemsharedmemory/status", 501),
    ("POST", "/v2/repository/index", 200),
    ("POST", "/v2/repository/models/parameters/load", 503),
    ("POST", INFER, 200),
    ("POST", "/v2/models/nope/infer", 404),
    ("GET", INFER, 405),
    ("POST", "/v2/models/nope/generate", 404),
    ("POST", "/v2/health/live", 405),
]


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_a_restricted_api_wants_its_header(front: str, start: Start) -> None:
    refused = {"error": "This API is restricted, expecting header 'Admin-Key'"}
    with connect(front, start, RESTRICT) as client:
        for method, path, status in PATHS:
            body = BODY if path == INFER and method == "POST" else b""
            for headers in ({}, {"Admin-Key": "A=B:C"}, {"Admin-Key": ""}, {"other": "a=b:c"}):
                reply = client.request(method, path, body, headers)
                assert (reply.status, json.loads(reply.body)) == (403, refused), (method, path, headers)
                assert reply.headers["content-type"] == "application/json"
            assert client.request(method, path, body, {"ADMIN-key": "a=b:c"}).status == status, (method, path)
        assert client.request("GET", "/v2/nope").status == 404


def test_restricted_http_with_the_client(restricted: ServerProcess) -> None:
    with triton_http.InferenceServerClient(restricted.http) as client:
        with pytest.raises(InferenceServerException, match="expecting header 'Admin-Key'") as info:
            client.infer("parameters", [tensor(triton_http)])
        assert info.value.status() == "403"
        key = {"Admin-Key": "a=b:c"}
        assert client.is_server_live(headers=key) and not client.is_server_live()
        assert client.infer("parameters", [tensor(triton_http)], headers=key).as_numpy("OUT") is not None


@pytest.mark.slow
def test_restricted_protocols_want_their_metadata(restricted: ServerProcess) -> None:
    key, key2 = {"triton-grpc-protocol-key": "val"}, {"triton-grpc-protocol-k2": "v"}
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-{}'"
    with triton_grpc.InferenceServerClient(restricted.grpc) as client:
        calls: list[tuple[Any, dict[str, str]]] = [
            (client.is_server_live, key),
            (client.is_server_ready, key),
            (lambda headers=None: client.is_model_ready("parameters", headers=headers), key),
            (client.get_server_metadata, key),
            (lambda headers=None: client.get_model_metadata("parameters", headers=headers), key),
            (client.get_inference_statistics, key),
            (lambda headers=None: client.infer("parameters", [tensor(triton_grpc)], headers=headers), key),
            (client.get_log_settings, key2),
        ]
        for call, headers in calls:
            for wrong in (None, {next(iter(headers)): "VAL"}, key2 if headers is key else key):
                with pytest.raises(InferenceServerException) as info:
                    call(headers=wrong)
                assert info.value.status() == "StatusCode.UNAVAILABLE"
                assert info.value.message() == text.format("key" if headers is key else "k2")
            assert call(headers=headers)
        assert client.get_model_config("parameters").config.name == "parameters"  # not in a group
        with Answers(client) as answers:
            assert text.format("key") in str(answers.error())
        with Answers(client, headers=key) as answers:
            client.async_stream_infer("parameters", [tensor(triton_grpc)])
            answers.result()


def test_the_health_service_is_restricted_with_health(restricted: ServerProcess) -> None:
    with grpc.insecure_channel(restricted.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as info:
            check(b"")
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
        assert check(b"", metadata=(("triton-grpc-protocol-key", "val"),)) == b"\x08\x01"


def test_every_endpoint_belongs_to_a_category(repository: Path) -> None:
    assert {verb for verb, _, _ in TABLE} == set(VERB_CATEGORIES)
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    methods = {f"/{service.full_name}/{method.name}" for method in service.methods}
    health = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    assert set(METHOD_CATEGORIES) == methods | health
    served = {path for servicer in servicers(None, None) for path in servicer.__mapping__()}
    assert {path for path in served if "Reflection" not in path} <= set(METHOD_CATEGORIES)


# ---------------------------------------------------------------- secrets that are not on the command line


@pytest.mark.slow
def test_secrets_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    secrets = tmp_path / "secrets"
    secrets.write_text("# who may load\n\nmodel-repository:Admin-Key=of a file\n")
    secrets.chmod(0o600)
    environment = {**os.environ, "NEPTRIO_GRPC_RESTRICTED_PROTOCOL": "logging:admin-key=of-the-environment"}
    with ServerProcess(
        tmp_path / "models", f"--http-restricted-api-file={secrets}", "--log-verbose=0", env=environment
    ) as server:
        with Http1(server.http) as client:
            assert client.request("POST", "/v2/repository/index").status == 403
            assert (
                client.request("POST", "/v2/repository/index", b"", {"admin-key": "of a file"}).status == 200
            )
        with triton_grpc.InferenceServerClient(server.grpc) as stub:
            with pytest.raises(InferenceServerException, match="restricted"):
                stub.get_log_settings()
            stub.get_log_settings(headers={"triton-grpc-protocol-admin-key": "of-the-environment"})
            stub.get_model_repository_index()
        assert b"of a file" not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("text", ["model-repository", "nothing:secret-key=s3cret", "health:a b=s3cret"])
def test_a_wrong_line_of_secrets_is_told_without_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from neptrio.cli import settings_of

    secrets = tmp_path / "secrets"
    secrets.write_text("\n" + text)
    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", f"--http-restricted-api-file={secrets}"])
    told = capsys.readouterr().err
    assert f"'{secrets}', line 2: expected CATEGORY" in told
    assert "s3cret" not in told
    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", f"--http-restricted-api-file={secrets}.not"])
    assert "cannot be read" in capsys.readouterr().err
