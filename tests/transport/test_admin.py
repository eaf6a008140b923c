"""The admin listener: control verbs are served there and at no public port, over both protocols."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from neptrio import startup
from neptrio.errors import Denied
from neptrio.flags import AdminAddress, admin_address
from neptrio.service.audit import EVENTS
from neptrio.settings import Settings
from neptrio.transport.admin_only import check_call, check_verb
from neptrio.transport.header_policy import METHOD_CATEGORIES, METHOD_SCOPES, VERB_CATEGORIES, VERB_SCOPES
from neptrio.transport.unix_socket import UnixListener
from tests.service.test_network_changes import CHANGES
from tests.support.certificates import Certificates
from tests.support.http import Http1
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.test_audit import rows
from tests.transport.test_tokens import BODY, INFER, ask, auth, row

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
SEQUENCES = identity_config(
    extra="sequence_batching { max_sequence_idle_microseconds: 60000000 control_input { name: 'START' control { kind: CONTROL_SEQUENCE_START "
    "int32_false_true: [ 0, 1 ] } } }"
)
TENSOR = {"data_type": "TYPE_INT32", "dims": [-1]}
CONFIG = json.dumps(
    {
        "backend": "identity",
        "max_batch_size": 3,
        "input": [{"name": "INPUT0", **TENSOR}],
        "output": [{"name": "OUTPUT0", **TENSOR}],
    }
)
ONLY_THERE = "is served at the admin address only (--admin-address)"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity_config())
    write_model(folder, "sequences", SEQUENCES)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/admin"


@pytest.fixture(scope="module", params=["tcp", "unix"])
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("socket") / "admin"
    place = "127.0.0.1:0" if request.param == "tcp" else f"unix:{path}"
    with ServerProcess(repository, f"--admin-address={place}", *EXPLICIT) as process:
        yield process


def denied(call: Callable[[], Any]) -> None:
    with pytest.raises(InferenceServerException, match="admin address only") as error:
        call()
    assert error.value.status() == "StatusCode.PERMISSION_DENIED"


# ------------------------------------------------------------ the public ports


@pytest.mark.parametrize(("path", "body"), CHANGES, ids=[path for path, _ in CHANGES])
def test_the_public_rest_port_changes_nothing(server: ServerProcess, path: str, body: Any) -> None:
    with Http1(server.http) as client:
        reply = client.request("POST", path, json.dumps(body).encode())
        assert (reply.status, ONLY_THERE in json.loads(reply.body)["error"]) == (403, True)
        assert client.request("GET", "/v2/models/simple/ready").status == 200
        assert client.request("GET", path).status in (200, 405)  # settings can still be read


def test_recent_traces_errors_and_lines_are_no_ones_but_the_operators(server: ServerProcess) -> None:
    paths = ("/v2/trace/recent", "/v2/errors", "/v2/models/simple/errors", "/v2/logging/recent")
    with Http1(server.http) as client, Http1(server.admin) as admin:
        for path in paths:
            assert client.request("GET", path).status == 403
            assert admin.request("GET", path).status == 200


@pytest.mark.slow
def test_the_public_grpc_port_changes_nothing(server: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        denied(lambda: client.load_model("simple"))
        denied(lambda: client.unload_model("simple"))
        denied(lambda: client.update_log_settings({"log_verbose_level": 1}))
        denied(lambda: client.update_trace_settings(None, {"trace_rate": "5"}))
        denied(lambda: client.update_trace_settings("simple", {"trace_rate": "5"}))
        denied(lambda: client.register_system_shared_memory("a", "/a", 1))
        denied(lambda: client.unregister_system_shared_memory())
        denied(lambda: client.register_cuda_shared_memory("a", b"", 0, 1))
        denied(lambda: client.unregister_cuda_shared_memory())
        assert client.is_model_ready("simple")


def test_the_public_ports_can_be_read(server: ServerProcess) -> None:
    with Http1(server.http) as client:
        for path in (
            "/v2/logging", "/v2/trace/setting", "/v2/models/stats", "/v2/models/simple/config",
            "/v2/systemsharedmemory/status", "/v2/models/sequences/sequences", "/v2/repository/models/simple",
        ):  # fmt: skip
            assert client.request("GET", path).status == 200, path
        assert client.request("POST", "/v2/repository/index").status == 200
        assert client.request("POST", INFER, BODY).status == 200
    with triton_grpc.InferenceServerClient(server.grpc) as grpc_client:
        assert len(grpc_client.get_model_repository_index().models) == 2
        assert grpc_client.get_log_settings().settings["log_info"].bool_param
        assert grpc_client.get_trace_settings().settings["trace_rate"].value == ["1000"]
        assert not grpc_client.get_system_shared_memory_status().regions
        assert grpc_client.infer("simple", identity_inputs(triton_grpc)).as_numpy("OUTPUT0") is not None


def test_every_verb_that_changes_something_is_control() -> None:
    """What the audit log records, and what a token needs `operate` or `admin` for, are the same verbs."""

    def refused(check: Callable[..., None], *args: Any) -> bool:
        try:
            check(*args)
        except Denied:
            return True
        return False

    class Message:
        def __init__(self, settings: dict[str, Any]) -> None:
            self.settings = settings

    changing, reading = Message({"trace_rate": "5"}), Message({})
    assert set(VERB_SCOPES) <= set(VERB_CATEGORIES)
    verbs = {verb for verb in VERB_CATEGORIES if refused(check_verb, verb, "POST")}
    methods = {path for path in METHOD_CATEGORIES if refused(check_call, path, changing)}
    names = {path.rpartition("/")[2] for path in methods}
    assert verbs - {"trace_recent", "errors", "logging_recent"} == {
        name for name in EVENTS if name in VERB_CATEGORIES
    }
    assert names == {name for name in EVENTS if name in METHOD_SCOPES}
    for path in (p for p in METHOD_CATEGORIES if "Setting" in p):
        assert not refused(check_call, path) and not refused(check_call, path, reading)


# ------------------------------------------------------------ the admin listener


def test_everything_is_done_at_the_admin_listener_over_rest(server: ServerProcess) -> None:
    with Http1(server.admin) as admin:

        def post(path: str, body: Any = None) -> Any:
            reply = admin.request("POST", path, json.dumps(body or {}).encode())
            assert reply.status == 200, reply.body
            return json.loads(reply.body) if reply.body else None

        post("/v2/repository/models/simple/unload")
        assert admin.request("GET", "/v2/models/simple/ready").status == 400
        post("/v2/repository/models/simple/load")
        assert admin.request("GET", "/v2/models/simple/ready").status == 200
        assert post("/v2/repository/models/simple/check")
        assert post("/v2/logging", {"log_verbose_level": 1})["log_verbose_level"] == 1
        post("/v2/logging", {"log_verbose_level": 0})
        assert post("/v2/trace/setting", {"trace_rate": "5"})["trace_rate"] == "5"
        assert post("/v2/models/simple/trace/setting", {"trace_rate": "7"})["trace_rate"] == "7"
        post("/v2/models/simple/trace/setting", {"trace_rate": None})
        post("/v2/trace/setting", {"trace_rate": None})
        post("/v2/systemsharedmemory/unregister")
        with Http1(server.http) as client:
            body = json.loads(BODY)
            body["parameters"] = {"sequence_id": 5, "sequence_start": True}
            reply = client.request("POST", "/v2/models/sequences/infer", json.dumps(body).encode())
            assert reply.status == 200, reply.body
        listed = json.loads(admin.request("GET", "/v2/models/sequences/sequences").body)
        assert "5" in json.dumps(listed)
        post("/v2/models/sequences/sequences/5/end")
        assert admin.request("GET", "/v2/health/live").status == 200
        assert admin.request("GET", "/v2").status == 200
        assert admin.request("POST", INFER, BODY).status == 200
        assert admin.request("GET", "/no").status == 404
        assert admin.request("PUT", "/v2/logging").status == 405
        metrics = admin.request("GET", "/metrics")
        assert metrics.status == 200 and b"nv_inference_request_success" in metrics.body


def test_everything_is_done_at_the_admin_listener_over_grpc(server: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(server.admin) as admin:
        assert admin.is_server_live() and admin.is_server_ready()
        admin.unload_model("simple")
        assert not admin.is_model_ready("simple")
        admin.load_model("simple")
        assert admin.is_model_ready("simple")
        changed = admin.update_log_settings({"log_verbose_level": 1}).settings
        assert changed["log_verbose_level"].uint32_param == 1
        admin.update_log_settings({"log_verbose_level": 0})
        assert admin.update_trace_settings(None, {"trace_rate": "5"}).settings["trace_rate"].value == ["5"]
        admin.update_trace_settings(None, {"trace_rate": None})
        region = shm.create_shared_memory_region("r", f"/neptrio-admin-{os.getpid()}", 64)
        try:
            admin.register_system_shared_memory("r", f"/neptrio-admin-{os.getpid()}", 64)
            assert "r" in admin.get_system_shared_memory_status().regions
            admin.unregister_system_shared_memory("r")
        finally:
            shm.destroy_shared_memory_region(region)
        found = admin.infer("simple", identity_inputs(triton_grpc)).as_numpy("OUTPUT0")
        assert found.tolist() == [list(range(16))]


def test_the_official_http_client_loads_at_a_tcp_address(repository: Path) -> None:
    with ServerProcess(repository, "--admin-address=127.0.0.1:0", *EXPLICIT) as server:
        with triton_http.InferenceServerClient(server.http) as client:
            for call in (
                lambda: client.load_model("simple"),
                lambda: client.unload_model("simple"),
                lambda: client.update_log_settings({"log_verbose_level": 1}),
                lambda: client.update_trace_settings(None, {"trace_rate": "5"}),
                lambda: client.register_system_shared_memory("a", "/a", 1),
            ):
                with pytest.raises(InferenceServerException, match="admin address only") as error:
                    call()
                assert error.value.status() == "403"
        with triton_http.InferenceServerClient(server.admin) as admin:
            admin.unload_model("simple")
            admin.load_model("simple", config=CONFIG)
            assert admin.get_model_config("simple")["max_batch_size"] == 3
            admin.update_log_settings({"log_verbose_level": 1})
            assert admin.update_trace_settings(None, {"trace_rate": "5"})["trace_rate"] == "5"
            found = admin.infer("simple", identity_inputs(triton_http)[:1]).as_numpy("OUTPUT0")
            assert found.tolist() == [list(range(16))]


def test_files_come_along_where_the_admin_listener_is_local(repository: Path, place: str) -> None:
    """Whether load calls may bring files depends on who can reach the listener that serves them."""
    parameters = {"config": CONFIG, "file:1/weights": "AAAA"}
    body = json.dumps({"parameters": parameters}).encode()
    with ServerProcess(repository, f"--admin-address={place}", "--http-address=0.0.0.0", *EXPLICIT) as server:
        with Http1(server.admin) as admin:
            reply = admin.request("POST", "/v2/repository/models/brought/load", body)
            assert reply.status == 200, reply.body
        assert "whoever can reach" not in server.log()


# ------------------------------------------------------------ who gets in


@pytest.mark.slow
def test_an_operator_gets_in_under_every_limit(repository: Path, place: str) -> None:
    flags = (
        "--max-connections=1", "--max-connections-per-address=1", "--max-requests-per-second-per-address=1",
        "--max-concurrent-requests-per-address=1", "--max-held-bytes=1",
    )  # fmt: skip
    large = json.dumps({"parameters": {"config": " " * 100_000 + "{}"}}).encode()
    with ServerProcess(repository, "--admin-address=127.0.0.1:0", *flags, *EXPLICIT) as server:
        with Http1(server.http) as client:
            assert client.request("POST", INFER, BODY).status == 200
            until(lambda: client.request("POST", INFER, BODY).status == 429, "the second's request is spent")
            with Http1(server.http) as second:
                assert second.request("POST", INFER, BODY).status == 503
            for _ in range(5):
                with Http1(server.admin) as admin:
                    assert admin.request("POST", "/v2/repository/models/simple/load").status == 200
                    assert admin.request("POST", INFER, BODY).status == 200
                    reply = admin.request("POST", "/v2/repository/models/simple/check", large)
                    assert reply.status == 200, reply.body
                with triton_grpc.InferenceServerClient(server.admin) as admin_grpc:
                    admin_grpc.load_model("simple")


@pytest.mark.slow
def test_an_operator_gets_in_when_clients_have_all_descriptors(repository: Path, place: str) -> None:
    """Connections may not use the last ones, and those that are kept serve the admin listener too."""
    with ServerProcess(repository, f"--admin-address={place}", *EXPLICIT, limits="ulimit -n 128") as server:
        crowd = [Http1(server.http) for _ in range(200)]
        server.until_logged("turned away a connection")
        with Http1(server.admin) as admin:
            assert admin.request("POST", "/v2/logging", b'{"log_verbose_level": 1}').status == 200
        with triton_grpc.InferenceServerClient(server.admin) as admin_grpc:
            admin_grpc.load_model("simple")
        for client in crowd:
            client.close()


@pytest.mark.slow
def test_the_newest_admin_connection_takes_the_place_of_the_oldest(repository: Path, place: str) -> None:
    """Whoever keeps connections open locks no operator out."""
    with ServerProcess(repository, f"--admin-address={place}", *EXPLICIT, limits="ulimit -n 256") as server:
        opened = [Http1(server.admin) for _ in range(20)]
        for connection in opened[-3:]:
            assert connection.request("GET", "/v2/health/live").status == 200
        assert opened[0].closed()
        for connection in opened:
            connection.close()


@pytest.mark.slow
def test_tokens_and_audit_hold_at_the_admin_listener(repository: Path, tmp_path: Path, place: str) -> None:
    tokens, audit = tmp_path / "auth.toml", tmp_path / "audit"
    tokens.write_text(row("boss", "admin", "read") + row("app", "infer"))
    flags = (f"--auth-config={tokens}", f"--audit-log={audit}", f"--admin-address={place}")
    load = "/v2/repository/models/simple/load"
    with ServerProcess(repository, *flags, *EXPLICIT) as server:
        with Http1(server.admin) as admin, Http1(server.http) as client:
            assert ask(admin, None, "POST", load).status == 401
            assert ask(admin, "app", "POST", load).status == 403
            assert ask(admin, "boss", "POST", load).status == 200
            assert ask(client, "boss", "POST", load).status == 403
            assert ask(admin, None, "GET", "/metrics").status == 401
            assert ask(admin, "boss", "GET", "/metrics").status == 200
        with triton_grpc.InferenceServerClient(server.admin) as admin_grpc:
            admin_grpc.load_model("simple", headers=auth("boss"))
    found = [(r["outcome"], r["protocol"], r["token"]) for r in rows(audit)]
    assert found == [
        ("refused", "http", None),
        ("refused", "http", "app"),
        ("ok", "http", "boss"),
        ("refused", "http", "boss"),
        ("ok", "grpc", "boss"),
    ]
    assert ONLY_THERE in rows(audit)[3]["error"] and rows(audit)[3]["address"] == "127.0.0.1"
    for at in (0, 1, 2, 4):
        assert rows(audit)[at]["address"] == f"unix uid={os.getuid()} pid={os.getpid()}"


def test_read_only_holds_at_the_admin_listener(repository: Path, place: str) -> None:
    with ServerProcess(repository, f"--admin-address={place}", "--read-only", *EXPLICIT) as server:
        with Http1(server.admin) as admin:
            reply = admin.request("POST", "/v2/repository/models/simple/load")
            assert (reply.status, b"--read-only" in reply.body) == (403, True)


def test_no_page_may_use_the_admin_listener(repository: Path) -> None:
    page = {"Origin": "https://ui.example"}
    with ServerProcess(
        repository, "--admin-address=127.0.0.1:0", "--cors-allow-origin=*", *EXPLICIT
    ) as server:
        with Http1(server.http) as client, Http1(server.admin) as admin:
            assert client.request("POST", INFER, BODY, page).status == 200
            reply = admin.request("POST", "/v2/logging", b"{}", page)
            assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
            rebound = {"Host": "attacker.example"}
            assert admin.request("POST", "/v2/logging", b"{}", rebound).status == 403
            assert admin.request("GET", "/metrics", b"", rebound).status == 403
            assert admin.request("POST", "/v2/logging", b"{}").status == 200


def test_at_a_unix_socket_the_host_does_not_matter(server: ServerProcess) -> None:
    if server.admin.startswith("unix:"):
        with Http1(server.admin) as admin:
            assert admin.request("POST", "/v2/logging", b"{}", {"Host": "any.example"}).status == 200
            assert admin.request("GET", "/metrics", b"", {"Host": "any.example"}).status == 200


# ------------------------------------------------------------ TLS


@pytest.mark.slow
def test_a_tcp_address_speaks_tls_where_rest_does(repository: Path, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("server")
    flags = ("--admin-address=127.0.0.1:0", *certificates.flags("server"), *EXPLICIT)
    with ServerProcess(repository, *flags) as server:
        server.until_logged("admin    on https://")
        for offered in (["h2", "http/1.1"], ["http/1.1"], []):  # curl's, old clients', none
            context = certificates.client(alpn="")
            if offered:
                context.set_alpn_protocols(offered)
            with Http1(server.admin, context) as admin:
                assert admin.request("POST", "/v2/repository/models/simple/load").status == 200
                assert b"nv_" in admin.request("GET", "/metrics").body
        with triton_grpc.InferenceServerClient(
            server.admin, ssl=True, creds=grpc.ssl_channel_credentials(certificates.roots.read_bytes())
        ) as admin_grpc:
            admin_grpc.unload_model("simple")
            admin_grpc.load_model("simple")
        with Http1(server.admin) as plain:
            assert plain.request("GET", "/v2").status == 400
            assert plain.closed()


@pytest.mark.slow
def test_certificates_hold_at_the_admin_listener(repository: Path, tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    certificate, key = made.issue("server")
    made.issue("boss", common_name="boss")
    made.issue("reader", common_name="reader")
    (tmp_path / "auth.toml").write_text(
        "".join(
            f'[[certificate]]\nname = "{name}"\ncommon_name = ["{name}"]\nscopes = ["{scope}"]\n'
            for name, scope in (("boss", "admin"), ("reader", "read"))
        )
    )
    audit = tmp_path / "audit"
    flags = (
        f"--http-tls-cert={certificate}", f"--http-tls-key={key}", f"--http-tls-client-ca={made.roots}",
        f"--auth-config={tmp_path}/auth.toml", f"--audit-log={audit}", "--admin-address=127.0.0.1:0",
    )  # fmt: skip
    load = "/v2/repository/models/simple/load"

    def over_grpc(server: ServerProcess, name: str) -> triton_grpc.InferenceServerClient:
        own, own_key = made.files(name)
        return triton_grpc.InferenceServerClient(
            server.admin,
            ssl=True,
            root_certificates=str(made.roots),
            private_key=str(own_key),
            certificate_chain=str(own),
        )

    with ServerProcess(repository, *flags, *EXPLICIT) as server:
        with Http1(server.admin, made.client("boss")) as admin:
            assert admin.request("POST", load).status == 200
            assert admin.request("GET", "/metrics").status == 403
        with Http1(server.admin, made.client("reader")) as reader:
            assert reader.request("POST", load).status == 403
            assert reader.request("GET", "/metrics").status == 200
        with pytest.raises((ssl.SSLError, ConnectionError)), Http1(server.admin, made.client()) as nobody:
            nobody.request("GET", "/v2/health/live")
        with over_grpc(server, "boss") as admin_grpc:
            admin_grpc.load_model("simple")
        with over_grpc(server, "reader") as reader_grpc:
            assert reader_grpc.get_model_metadata("simple").name == "simple"
            with pytest.raises(InferenceServerException, match="certificate 'reader' may not do this"):
                reader_grpc.load_model("simple")
    found = [(r["protocol"], r["event"], r["outcome"], r["certificate"]) for r in rows(audit)]
    assert [(p, e, o, "commonName=boss" in c) for p, e, o, c in found if e == "load"] == [
        ("http", "load", "ok", True),
        ("http", "load", "refused", False),
        ("grpc", "load", "ok", True),
        ("grpc", "load", "refused", False),
    ]


# ------------------------------------------------------------ the socket file


@pytest.mark.slow
def test_the_file_is_its_owners_and_goes_with_the_server(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with ServerProcess(repository, f"--admin-address=unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        server.until_logged(f"admin    on unix:{path} (REST, gRPC, /metrics; control verbs only here)")
    assert not path.exists()
    with ServerProcess(repository, f"--admin-address=unix:{path}", "--admin-socket-mode=660"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.slow
def test_a_dead_servers_file_is_replaced_and_a_living_ones_is_not(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "admin"
    flag = f"--admin-address=unix:{path}"
    server = ServerProcess(repository, flag)
    server.stop(signal.SIGKILL)
    assert path.exists()
    with ServerProcess(repository, flag, *EXPLICIT) as second:
        with pytest.raises(
            AssertionError, match=f"cannot listen on unix:{path}: another server listens there"
        ):
            ServerProcess(repository, flag)
        with Http1(second.admin) as admin:
            assert admin.request("POST", "/v2/logging", b"{}").status == 200
    assert not path.exists()


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(OSError, match="there is something else, which is no socket"):
        UnixListener(path)
    assert path.read_text() == "precious"
    with pytest.raises(OSError, match="No such file or directory"):
        UnixListener(tmp_path / "none" / "file")
    with pytest.raises(OSError, match="more than 107 bytes"):
        UnixListener(tmp_path / ("x" * 200))


def test_a_file_that_another_server_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = UnixListener(path)
    path.unlink()
    second = UnixListener(path)
    first.remove()
    assert path.exists()
    second.remove()
    assert not path.exists()
    first.sock.close()
    second.sock.close()


def test_a_full_queue_is_a_living_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = UnixListener(path, backlog=0)
    waiting = []
    try:
        while True:  # nobody accepts
            client = socket.socket(socket.AF_UNIX)
            waiting.append(client)
            client.setblocking(False)
            client.connect(str(path))
    except BlockingIOError:
        pass
    with pytest.raises(OSError, match="another server listens there"):
        UnixListener(path)
    for opened in (*waiting, listener.sock):
        opened.close()


# ------------------------------------------------------------ the end, the settings


def listens(place: str) -> bool:
    host, port = place.rsplit(":", 1)
    if host == "unix":
        return Path(port).exists()
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_admin_connections_are_drained(server: ServerProcess, repository: Path, tmp_path: Path) -> None:
    kind = f"unix:{tmp_path}/admin" if server.admin.startswith("unix") else "127.0.0.1:0"
    patient = ("--exit-grace-secs=100", "--exit-timeout-secs=600")
    with ServerProcess(repository, f"--admin-address={kind}", *patient, *EXPLICIT) as other:
        with triton_grpc.InferenceServerClient(other.admin) as admin_grpc, Http1(other.admin) as admin:
            assert admin_grpc.is_server_live()
            assert admin.request("GET", "/v2/health/live").status == 200
            other.process.send_signal(signal.SIGTERM)
            until(lambda: not listens(other.admin), "it listens no more")
            reply = admin.request("GET", "/v2/health/live")
            assert (reply.status, reply.headers.get("connection")) == (200, "close")
            assert admin.closed()
        assert other.ended() == 0


def test_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    from neptrio.cli import settings_of

    assert admin_address("127.0.0.1:9000") == AdminAddress("127.0.0.1", 9000)
    assert admin_address("[::1]:9000") == AdminAddress("::1", 9000)
    assert str(admin_address("[::1]:9000")) == "[::1]:9000"
    assert admin_address("unix:/run/a b") == AdminAddress(path=Path("/run/a b"))
    settings, _ = settings_of(
        ["--model-repository=x", "--admin-address=localhost:0", "--admin-socket-mode=0660"]
    )
    assert settings.admin_address == AdminAddress("localhost", 0) and settings.admin_socket_mode == 0o660
    for wrong in ("9000", "host", "host:", ":9000", "host:99999", "unix:", "::1:9000", "a b:1"):
        with pytest.raises(SystemExit):
            settings_of(["--model-repository=x", f"--admin-address={wrong}"])
        assert "expected HOST:PORT, [IPV6]:PORT or unix:PATH" in capsys.readouterr().err
    for wrong in ("rw", "9", "7777", "68"):
        with pytest.raises(SystemExit):
            settings_of(["--model-repository=x", f"--admin-socket-mode={wrong}"])
        assert "octal" in capsys.readouterr().err


def test_what_is_open_is_what_the_admin_listener_opens() -> None:
    told = startup.open_controls
    assert not told(Settings(admin_address=AdminAddress("127.0.0.1", 1)))
    assert not told(Settings(admin_address=AdminAddress(path=Path("/a"))))
    assert "0.0.0.0:1 may use the control verbs of trace" in told(
        Settings(admin_address=AdminAddress("0.0.0.0", 1), http_address="127.0.0.1", grpc_address="127.0.0.1")
    )
