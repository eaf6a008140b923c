"""Client certificates as clients of --auth-config: real certificates over REST, gRPC and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent.ssl
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.sequences.models import sequence_config
from tests.support.certificates import Certificates
from tests.support.http import Http1, Http2, Reply
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until
from tests.transport.test_audit import rows
from tests.transport.test_tokens import BODY, INFER, auth, row

FILE = (
    row("token", "read")
    + """
[[certificate]]
name = "trainer"
common_name = ["trainer-*"]
scopes = ["infer"]
models = ["simple", "sum"]

[[certificate]]
name = "ops"
common_name = ["ops"]
dns = ["*.ops.example"]
scopes = ["operate", "admin"]

[[certificate]]
name = "scraper"
email = ["prometheus@*"]
scopes = ["read"]

[[certificate]]
name = "all-trainers"
common_name = ["trainer-*"]
scopes = ["infer", "admin"]
"""
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("server")
    made.issue("trainer", names=("trainer.example",), common_name="trainer-7")
    made.issue("ops", names=("a.ops.example", "other.example"), common_name="ops")
    made.issue("only a name", names=("other.example",), common_name="ops")
    made.issue("scraper", names=("prometheus@example.org",))
    return made


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="module")
def server(
    certificates: Certificates, audit: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "models", "simple", identity_config())
    write_model(folder / "models", "other", identity_config())
    write_model(folder / "models", "sum", sequence_config("direct { }", 4, idle_us=3_600_000_000))
    (folder / "auth.toml").write_text(FILE)
    certificate, key = certificates.files("server")
    flags = [
        f"--auth-config={folder}/auth.toml",
        f"--audit-log={audit}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--http-tls-client-ca={certificates.roots}",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={certificates.roots}",
        f"--metrics-tls-client-ca={certificates.roots}",
    ]
    for port in ("http", "metrics"):
        flags += [f"--{port}-tls-cert={certificate}", f"--{port}-tls-key={key}"]
    with ServerProcess(folder / "models", *flags) as process:
        yield process


@pytest.fixture(params=["http/1.1", "h2"])
def alpn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rest(
    server: ServerProcess,
    certificates: Certificates,
    name: str,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    alpn: str = "http/1.1",
    token: str = "",
) -> Reply:
    """One request with the certificate of `name`."""
    kind: Any = Http2 if alpn == "h2" else Http1
    with kind(server.http, certificates.client(name, alpn)) as client:
        return client.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})  # type: ignore[no-any-return]


def test_certificates_have_scopes_over_rest(
    server: ServerProcess, certificates: Certificates, alpn: str
) -> None:
    def ask(name: str, method: str, path: str, body: bytes = b"", token: str = "") -> tuple[int, str]:
        reply = rest(server, certificates, name, method, path, body, alpn=alpn, token=token)
        return reply.status, reply.body.decode()

    assert ask("trainer", "POST", INFER, BODY)[0] == 200
    status, text = ask("trainer", "POST", "/v2/models/other/infer", BODY)
    assert (status, "certificate 'trainer' is limited to some models" in text) == (403, True)
    # of several entries the first counts
    status, text = ask("trainer", "POST", "/v2/repository/models/simple/load")
    assert (status, "certificate 'trainer' may not do this: it needs the scope admin" in text) == (403, True)
    assert ask("ops", "POST", "/v2/repository/models/other/load")[0] == 200
    assert ask("ops", "POST", INFER, BODY)[0] == 403
    # every kind of name that an entry gives must match
    status, text = ask("only a name", "POST", "/v2/repository/models/other/load")
    assert (status, "no entry for this certificate" in text) == (401, True)
    assert ask("only a name", "GET", "/v2/health/ready")[0] == 200
    # a token counts before the certificate, a wrong one too
    assert ask("trainer", "GET", "/v2/models/other", token="token")[0] == 200
    assert ask("trainer", "POST", INFER, BODY, token="token")[0] == 403
    assert ask("trainer", "POST", INFER, BODY, token="wrong")[0] == 401


def test_metrics_by_certificate(server: ServerProcess, certificates: Certificates) -> None:
    for name, status in (("scraper", 200), ("trainer", 403), ("only a name", 401)):
        with Http1(server.metrics, certificates.client(name)) as client:
            reply = client.request("GET", "/metrics")
            assert (reply.status, b"nv_" in reply.body) == (status, status == 200)


def triton(server: ServerProcess, certificates: Certificates, name: str) -> Any:
    certificate, key = certificates.files(name)
    return triton_grpc.InferenceServerClient(
        server.grpc,
        ssl=True,
        root_certificates=str(certificates.roots),
        private_key=str(key),
        certificate_chain=str(certificate),
    )


def test_certificates_have_scopes_over_grpc(server: ServerProcess, certificates: Certificates) -> None:
    with triton(server, certificates, "trainer") as client:
        assert client.infer("simple", identity_inputs(triton_grpc)) is not None
        with pytest.raises(InferenceServerException, match="certificate 'trainer' is limited") as error:
            client.infer("other", identity_inputs(triton_grpc))
        assert error.value.status() == "StatusCode.PERMISSION_DENIED"
        with pytest.raises(InferenceServerException, match="certificate 'trainer' may not do this"):
            client.get_model_metadata("simple")
        assert client.get_model_metadata("simple", headers=auth("token")).name == "simple"
        with Answers(client) as answers:
            client.async_stream_infer("simple", identity_inputs(triton_grpc))
            answers.result()
            client.async_stream_infer("other", identity_inputs(triton_grpc))
            assert "limited to some models" in str(answers.error())
    with triton(server, certificates, "ops") as client:
        client.load_model("other")
    with triton(server, certificates, "only a name") as client:
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="no entry for this certificate") as error:
            client.infer("simple", identity_inputs(triton_grpc))
        assert error.value.status() == "StatusCode.UNAUTHENTICATED"


def test_the_http_client_of_tritonclient(server: ServerProcess, certificates: Certificates) -> None:
    def context() -> Any:
        made = gevent.ssl.create_default_context(cafile=str(certificates.roots))
        made.load_cert_chain(*map(str, certificates.files("trainer")))
        return made

    with triton_http.InferenceServerClient(server.http, ssl=True, ssl_context_factory=context) as client:
        assert client.infer("simple", identity_inputs(triton_http)) is not None
        with pytest.raises(InferenceServerException, match="certificate 'trainer' is limited"):
            client.infer("other", identity_inputs(triton_http))


def test_sequences_belong_to_a_certificate(server: ServerProcess, certificates: Certificates) -> None:
    """It is a client like a token: nobody else has its ids."""
    tensor = triton_grpc.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[5]], np.int32))
    with triton(server, certificates, "trainer") as client:
        client.infer("sum", [tensor], sequence_id=9, sequence_start=True)
        path = "/v2/models/sum/sequences"
        reply = rest(server, certificates, "ops", "POST", f"{path}/9/end?token=ops")
        assert reply.status == 404
        reply = rest(server, certificates, "ops", "POST", f"{path}/9/end?token=trainer")
        assert reply.status == 200


def test_the_audit_log_names_the_certificate(
    server: ServerProcess, certificates: Certificates, audit: Path
) -> None:
    # what the tests before have done is written before this
    assert rest(server, certificates, "ops", "POST", "/v2/repository/models/mark/load").status == 500

    def written() -> list[Any]:
        """The new records."""
        found = rows(audit)
        marks = [number for number, row in enumerate(found, 1) if row.get("model") == "mark"]
        return found[marks[0] :] if marks else []

    assert rest(server, certificates, "ops", "POST", "/v2/repository/models/other/load").status == 200
    assert rest(server, certificates, "trainer", "POST", "/v2/models/other/infer", BODY).status == 403
    with triton(server, certificates, "ops") as client:
        client.load_model("other")
    until(lambda: len(written()) == 3, "the records are written")
    found = written()
    assert [(r["event"], r["outcome"], r["token"], r["protocol"]) for r in found] == [
        ("load", "ok", "ops", "http"),
        ("infer", "refused", "trainer", "http"),
        ("load", "ok", "ops", "grpc"),
    ]
    assert ["commonName=ops" in r["certificate"] for r in found] == [True, False, True]
    assert "commonName=trainer-7" in found[1]["certificate"]


@pytest.mark.slow
def test_the_file_is_read_again_for_connections_that_are_there(
    certificates: Certificates, tmp_path: Path
) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    file = tmp_path / "auth.toml"
    file.write_text(FILE)
    certificate, key = certificates.files("server")
    flags = [
        f"--auth-config={file}",
        f"--http-tls-cert={certificate}",
        f"--http-tls-key={key}",
        f"--http-tls-client-ca={certificates.roots}",
    ]
    with ServerProcess(tmp_path / "models", *flags) as server:
        with Http1(server.http, certificates.client("trainer")) as client:
            assert client.request("POST", INFER, BODY).status == 200
            (tmp_path / "new").write_text(FILE.replace('"trainer-*"', '"nobody"'))
            (tmp_path / "new").replace(file)
            server.until_logged("there are 1 tokens now, and 4 entries of certificates")
            reply = client.request("POST", INFER, BODY)
            assert reply.status == 401
            assert "no entry for this certificate" in json.loads(reply.body)["error"]
