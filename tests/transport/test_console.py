"""The console at the metrics port and the admin listener: who is served what, under which policies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neptrio.flags import AdminAddress
from neptrio.settings import Settings
from neptrio.transport.console import rest_path
from tests.support.certificates import Certificates
from tests.support.http import Http1, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.test_tokens import BODY, FILE
from tests.transport.test_tokens import INFER as REST_INFER

INFER = "/console" + REST_INFER


def ask(address: str, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    with Http1(address) as client:
        return client.request(
            method, path, body, {key.replace("_", "-"): value for key, value in headers.items()}
        )


def get(address: str, path: str, **headers: str) -> Any:
    reply = ask(address, "GET", path, **headers)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("repository")
    write_model(folder, "simple", identity_config())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(repository, *flags) as process:
        yield process


def test_pages_have_types_etags_and_the_policy(server: ServerProcess) -> None:
    moved = ask(server.metrics, "GET", "/console")
    assert (moved.status, moved.headers["location"]) == (308, "/console/")
    for path, kind in (("/console/", "text/html"), ("/console/main.js", "text/javascript")):
        reply = ask(server.metrics, "GET", path + "?x=1")
        assert reply.status == 200 and reply.headers["content-type"].startswith(kind)
        assert "script-src 'self'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = ask(server.metrics, "GET", path, If_None_Match=reply.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        head = ask(server.metrics, "HEAD", path)
        assert (head.status, head.body) == (200, b"") and int(head.headers["content-length"]) == len(
            reply.body
        )
    for path in ("/console/none.js", "/console/../pages.py", "/console//etc/passwd", "/console/%2e%2e/x"):
        assert ask(server.metrics, "GET", path).status == 404
    assert ask(server.metrics, "POST", "/console/").status == 405
    assert re.search(r"console  on http://127\.0\.0\.1:\d+/console\n", server.log())


def test_the_port_answers_the_verbs_that_the_console_needs(server: ServerProcess) -> None:
    assert json.loads(ask(server.metrics, "POST", INFER, BODY).body)["outputs"][0]["name"] == "OUTPUT0"
    stats = get(server.metrics, "/console/v2/models/stats?live=true&histograms=true")
    assert stats["model_stats"][0]["live"]["accepted"] == 0
    assert json.loads(ask(server.metrics, "POST", "/console/v2/repository/index").body)[0]["state"] == "READY"
    assert ask(server.metrics, "POST", "/console/v2/repository/models/simple/load").status == 200
    assert b"unknown model" in ask(server.metrics, "GET", "/console/v2/models/none").body
    assert ask(server.metrics, "GET", "/console/v2/none").status == 404
    assert ask(server.metrics, "GET", "/console/v2/systemsharedmemory/status").status == 404
    assert ask(server.metrics, "GET", "/metrics").body.startswith(b"# HELP")
    for path in ("/other", "/consoles"):
        reply = ask(server.metrics, "GET", path)
        assert reply.status == 200 and reply.body.startswith(b"# metrics are at /metrics; ")


def test_the_server_as_a_whole(server: ServerProcess) -> None:
    found = get(server.metrics, "/console/server.json")
    assert found["process"]["pid"] == server.process.pid and found["process"]["resident_bytes"] > 1 << 20
    assert found["ready"] is True and found["cache"] is None
    about = get(server.metrics, "/console/about.json")
    assert about["rest"] == {"port": int(server.http.rpartition(":")[2]), "tls": False}
    assert about["grpc"] == {
        "port": int(server.grpc.rpartition(":")[2]),
        "tls": False,
        "header": None,
    }
    assert (about["tokens"], about["model_control_mode"]) == (False, "explicit")


def test_the_configuration_says_what_was_defaulted(server: ServerProcess) -> None:
    plain = get(server.http, "/v2/models/simple/config")
    marked = get(server.metrics, "/console/v2/models/simple/config?defaulted=true")
    marks = marked.pop("defaulted")
    assert marked == plain and "defaulted" not in plain
    assert ["instance_group"] in marks and ["max_batch_size"] not in marks and ["input"] not in marks


def test_a_configuration_that_was_replaced_says_so(server: ServerProcess) -> None:
    config = {
        "backend": "identity",
        "max_batch_size": 4,
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
    }
    config |= {
        side + "put": [
            {"name": f"{side.upper()}PUT{i}", "data_type": "TYPE_INT32", "dims": [16]} for i in (0, 1)
        ]
        for side in ("in", "out")
    }
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    assert ask(server.metrics, "POST", "/console/v2/repository/models/simple/load", body).status == 200
    marks = get(server.metrics, "/console/v2/models/simple/config?defaulted=true")["defaulted"]
    assert not [path for path in marks if path == ["instance_group"]]
    assert ask(server.metrics, "POST", "/console/v2/repository/models/simple/load").status == 200


def test_pages_of_other_origins_are_refused(server: ServerProcess) -> None:
    own = f"http://{server.metrics}"
    host = server.metrics
    assert ask(server.metrics, "POST", INFER, BODY, Host=host, Origin=own).status == 200
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
    ):
        for path in (INFER, "/console/v2/repository/models/simple/load", "/console/v2/logging"):
            reply = ask(server.metrics, "POST", path, BODY, Host=host, **headers)
            assert reply.status == 403, (path, headers)
    # a page whose name points to this machine since it was loaded
    for path in (
        "/console/",
        "/console/main.js",
        "/console/server.json",
        "/console/v2/models/stats",
        "/metrics",
    ):
        assert ask(server.metrics, "GET", path, Host="evil.example").status == 403


def test_other_origins_that_rest_allows_may_not_use_the_console(repository: Path) -> None:
    with ServerProcess(repository, "--cors-allow-origin=*") as process:
        reply = ask(process.metrics, "POST", INFER, BODY, Origin="https://ui.example")
        assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
        assert ask(process.http, "POST", REST_INFER, BODY, Origin="https://ui.example").status == 200


def test_large_requests_are_answered(repository: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "long", LONG)
    size = 100_000
    body = json.dumps(
        {"inputs": [{"name": "INPUT0", "shape": [size], "datatype": "INT32", "data": [7] * size}]}
    ).encode()
    with ServerProcess(tmp_path, "--http-max-input-size=1000000") as process:
        reply = ask(process.metrics, "POST", "/console/v2/models/long/infer", body)
        assert json.loads(reply.body)["outputs"][0]["data"] == [7] * size
        assert ask(process.metrics, "POST", "/console/v2/models/long/infer", b" " * 1_000_001).status == 413


LONG = (
    'backend: "identity" input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } '
    'output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }'
)


def test_it_is_served_over_tls(repository: Path, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificate, key = certificates.issue("metrics")
    flags = (f"--metrics-tls-cert={certificate}", f"--metrics-tls-key={key}")
    with (
        ServerProcess(repository, *flags) as process,
        Http1(process.metrics, certificates.client()) as client,
    ):
        assert f"console  on https://{process.metrics}/console\n" in process.log()
        page = client.request("GET", "/console/")
        assert page.status == 200 and "frame-ancestors 'none'" in page.headers["content-security-policy"]
        host = process.metrics
        for origin, status in ((f"https://{host}", 200), ("https://evil.example", 403)):
            reply = client.request("POST", INFER, BODY, {"Host": host, "Origin": origin})
            assert reply.status == status


def test_tokens_hold(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    file.write_text(FILE)
    with ServerProcess(repository, f"--auth-config={file}", "--model-control-mode=explicit", "--load-model=*") as process:  # fmt: skip
        assert ask(process.metrics, "GET", "/console/").status == 200
        assert get(process.metrics, "/console/about.json")["tokens"] is True

        def status(method: str, path: str, token: str, body: bytes = b"{}") -> int:
            return ask(process.metrics, method, path, body, Authorization=f"Bearer {token}").status

        for path in ("/console/v2/models/stats", "/console/server.json"):
            assert ask(process.metrics, "GET", path).status == 401
            assert status("GET", path, "wrong") == 401
            assert status("GET", path, "infer") == status("GET", path, "other") == 403
            assert status("GET", path, "read") == 200
        assert status("POST", INFER, "infer", BODY) == 200
        assert status("POST", INFER, "read", BODY) == 403
        load = "/console/v2/repository/models/simple/load"
        assert (status("POST", load, "operate"), status("POST", load, "admin")) == (403, 200)
        assert (
            status("GET", "/console/v2/trace/recent", "read"),
            status("GET", "/console/v2/trace/recent", "operate"),
        ) == (
            403,
            200,
        )


def test_restricted_apis_and_read_only_hold(repository: Path) -> None:
    flags = (
        "--http-restricted-api=statistics,model-repository:x-key=secret",
        "--grpc-restricted-protocol=inference:other-key=secret",
        "--read-only=true",
    )
    with ServerProcess(repository, *flags) as process:
        for path in ("/console/v2/models/stats", "/console/server.json"):
            refused = ask(process.metrics, "GET", path)
            assert refused.status == 403 and b"expecting header 'x-key'" in refused.body
            assert ask(process.metrics, "GET", path, x_key="secret").status == 200
        about = get(process.metrics, "/console/about.json")
        assert about["restricted"] == {"statistics": "x-key", "model-repository": "x-key"}
        assert about["grpc"]["header"] == "triton-grpc-protocol-other-key"
        assert about["read_only"] is True and "secret" not in json.dumps(about)
        assert ask(process.metrics, "POST", "/console/v2/logging", b'{"log_info": false}').status == 403


def test_control_stays_at_the_admin_listener(repository: Path) -> None:
    flags = ("--admin-address=127.0.0.1:0", "--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(repository, *flags) as process:
        load = "/console/v2/repository/models/simple/load"
        assert ask(process.metrics, "POST", load).status == 403
        assert get(process.metrics, "/console/about.json")["admin_elsewhere"] is True
        assert ask(process.admin, "GET", "/console/").status == 200
        assert get(process.admin, "/console/about.json")["admin_elsewhere"] is False
        assert get(process.admin, "/console/server.json")["process"]["pid"] == process.process.pid
        assert ask(process.admin, "POST", load).status == 200
        assert ask(process.admin, "GET", "/console/", Host="evil.example").status == 403


def test_the_flag_switches_it_off(repository: Path) -> None:
    with ServerProcess(repository, "--allow-console=false") as process:
        for path in ("/console", "/console/"):
            reply = ask(process.metrics, "GET", path)
            assert reply.status == 404 and b"--allow-console=true" in reply.body
        for path in ("/console/main.js", "/console/v2/models/stats"):
            reply = ask(process.metrics, "GET", path)
            assert reply.status == 200 and reply.body.startswith(b"# metrics are at /metrics; "), (
                "as any other path of the metrics port"
            )
        assert ask(process.metrics, "POST", INFER, BODY).status == 405
        assert "console" not in process.log()


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"/console/v2", b"/v2"),
        (b"/console/v2/models/m/infer", b"/v2/models/m/infer"),
        (b"/console/v2/models/a%20b%3Cx%3E/versions/1?x=%20", b"/v2/models/a b<x>/versions/1?x=%20"),
        (b"/console/v2/repository/models/%41%2541/load", b"/v2/repository/models/A%41/load"),
        # what would be another path, and what no path of REST can say
        (b"/console/v2/models/a%2Fb/infer", b"/v2/models/a%2Fb/infer"),
        (b"/console/v2/models/a%3Fb/infer", b"/v2/models/a%3Fb/infer"),
        (b"/console/v2/models/a%00/infer", b"/v2/models/a%00/infer"),
        (b"/console/v2/models/%C3%A9/infer", b"/v2/models/%C3%A9/infer"),
        (b"/console/v2/models/m/sequences/%41/end", b"/v2/models/m/sequences/%41/end"),
    ],
)
def test_names_of_models_are_decoded_once(sent: bytes, meant: bytes) -> None:
    assert rest_path(sent) == meant


def test_where_it_is_on_by_itself(tmp_path: Path) -> None:
    assert Settings().console_at("127.0.0.1") and Settings().console_at("::1")
    assert not Settings().console_at("0.0.0.0") and not Settings().console_at("10.0.0.1")
    assert not Settings(allow_http=False).console_at("127.0.0.1"), "it would be a way in that REST is not"
    assert Settings(allow_http=False).console_at("127.0.0.1", admin=True)
    assert not Settings().console_at("", admin=True), "no browser opens a Unix socket"
    assert Settings(allow_console=True).console_at("0.0.0.0")
    assert not Settings(allow_console=False).console_at("127.0.0.1", admin=True)


def test_it_is_no_way_around_client_certificates(tmp_path: Path) -> None:
    files = {"http_tls_cert": tmp_path, "http_tls_key": tmp_path, "http_tls_client_ca": tmp_path / "ca"}
    metrics = {"metrics_tls_cert": tmp_path, "metrics_tls_key": tmp_path}
    assert not Settings(**files).console_at("127.0.0.1")  # type: ignore[arg-type]
    other = {**files, **metrics, "metrics_tls_client_ca": tmp_path / "scrapers"}
    assert not Settings(**other).console_at("127.0.0.1")  # type: ignore[arg-type]
    same = {**files, **metrics, "metrics_tls_client_ca": tmp_path / "ca"}
    assert Settings(**same).console_at("127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--metrics-tls-client-ca the file of --http-tls-client-ca"):
        Settings(**other, allow_console=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same certificates"):
        Settings(**files, allow_console=True)  # type: ignore[arg-type]


def test_a_console_that_others_can_reach_counts_as_exposed() -> None:
    inside = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "metrics_address": "0.0.0.0"}
    assert not Settings(**inside).exposed  # type: ignore[arg-type]
    settings = Settings(**inside, allow_console=True)  # type: ignore[arg-type]
    assert settings.exposed == ("0.0.0.0:8002",)
    admin = AdminAddress(host="127.0.0.1", port=0)
    assert not Settings(**inside, allow_console=True, admin_address=admin).exposed  # type: ignore[arg-type]


def test_the_limits_of_an_address_hold_for_the_console_and_rest_together(repository: Path) -> None:
    with ServerProcess(repository, "--max-requests-per-second-per-address=1") as limited:
        ways = [(limited.metrics, INFER), (limited.http, REST_INFER)]
        # whenever a second begins, of many in a row most are too many
        statuses = [ask(ways[i % 2][0], "POST", ways[i % 2][1], BODY).status for i in range(40)]
        assert statuses[0] == 200 and set(statuses) == {200, 429}
        assert 429 in statuses[0::2] and 429 in statuses[1::2]
        for _ in range(3):  # probes and pages are always answered
            assert ask(limited.metrics, "GET", "/console/v2/health/ready").status == 200
            assert ask(limited.metrics, "GET", "/console/").status == 200
