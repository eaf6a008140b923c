"""What operators can ask a server about its failures: the errors that requests met last, and the last lines of the log."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.errors import Cancelled, Internal, Reason, Unavailable
from neptrio.flags import Restriction
from neptrio.loop import slices
from neptrio.observe import last_errors, log_tail
from neptrio.observe.last_errors import LastErrors
from neptrio.observe.log_tail import LogTail
from neptrio.service.recent_log import RecentLog
from neptrio.settings import Settings
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from tests.support.certificates import Certificates
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until

ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e</script>"
RAISES = f"""
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_warn("seen " + {ESCAPES!r})
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError({ESCAPES!r})) for _ in requests]
"""
PYTHON = (
    'backend: "python" input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ] '
    'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "raises", PYTHON, {"1/model.py": RAISES})
    write_model(repository, "simple", identity_config())
    write_model(repository, "untouched", identity_config())
    step = (
        'platform: "ensemble" input [ { name: "A" data_type: TYPE_INT32 dims: [ 16 ] } ] output [ { name: "B" '
        'data_type: TYPE_INT32 dims: [ 16 ] } ] ensemble_scheduling { step [ { model_name: "raises" model_version: -1 '
        'input_map { key: "INPUT0" value: "A" } output_map { key: "OUTPUT0" value: "B" } } ] }'
    )
    write_model(repository, "around", step)
    with ServerProcess(repository, "--loop-lag-warning-ms=0") as process:  # which a slow machine would log
        yield process


def get(server: ServerProcess, path: str, status: int = 200) -> Any:
    with Http1(server.http) as client:
        reply = client.request("GET", path)
    assert reply.status == status, reply.body
    return json.loads(reply.body)


def fails(module: Any, address: str, model: str, name: str, length: int = 16, **options: Any) -> str:
    tensor = module.InferInput(name, [length], "INT32")
    tensor.set_data_from_numpy(np.zeros(length, np.int32))
    with module.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as info:
        client.infer(model, [tensor], **options)
    return str(info.value.message())


def errors(server: ServerProcess, model: str) -> list[dict[str, Any]]:
    (row,) = get(server, f"/v2/models/{model}/errors")["models"]
    assert (row["name"], row["version"]) == (model, "1")
    found: list[dict[str, Any]] = row["errors"]
    return found


def test_what_requests_met_is_told_with_how_often_and_when(server: ServerProcess) -> None:
    assert errors(server, "untouched") == []
    for request_id in ("a", "b", "c"):
        fails(httpclient, server.http, "raises", "INPUT0", request_id=request_id)
    fails(grpcclient, server.grpc, "around", "A")
    # refused, over both protocols: the ids at the beginning of the texts make no two errors of one
    fails(httpclient, server.http, "raises", "INPUT0", 3, request_id="d")
    wrong = fails(grpcclient, server.grpc, "raises", "INPUT0", 3, request_id="e")
    assert wrong.startswith("[request id: e] unexpected shape")
    latest, first = errors(server, "raises")
    assert latest["text"] == wrong.partition("] ")[2] and latest["count"] == 2
    assert (latest["refused"], latest["code"], latest["reason"]) == (True, "Invalid argument", "OTHER")
    assert first["count"] == 4 and not first["refused"]
    assert latest["first"] <= latest["last"] and first["first"] <= first["last"] <= latest["last"]
    (through,) = errors(server, "around")
    assert through["text"].startswith("in ensemble 'around', ") and through["count"] == 1
    counted = get(server, "/v2/models/raises/stats")["model_stats"][0]["inference_stats"]["fail"]["count"]
    assert counted == first["count"], "what was refused is no failure of the model's"
    everything = get(server, "/v2/errors")["models"]
    assert {(row["name"], row["version"]) for row in everything} == {("around", "1"), ("raises", "1")}
    assert get(server, "/v2/models/raises/versions/1/errors")["models"][0]["errors"] == [latest, first]
    assert get(server, "/v2/models/none/errors", 400)["error"] == "requested model 'none' is not available"


def seen(server: ServerProcess) -> list[str]:
    """What the model has logged, a line for each execution, when all of it has come to the log: that may be later than the
    answers."""

    def logged() -> list[str]:
        return [
            line["text"] for line in get(server, "/v2/logging/recent")["lines"] if "seen " in line["text"]
        ]

    executed = get(server, "/v2/models/raises/stats")["model_stats"][0]["execution_count"]
    until(lambda: len(logged()) == executed, logged)
    return logged()


def test_no_text_moves_a_terminal(server: ServerProcess) -> None:
    fails(httpclient, server.http, "raises", "INPUT0")
    texts = [row["text"] for row in errors(server, "raises")]
    assert any(r"\u001b]0;title\u0007\u001b[2J\u202e</script>" in text for text in texts)
    lines = seen(server)
    assert lines and all(set(text).isdisjoint("\x1b\x07\u202e") for text in lines)
    assert "raises" in lines[0], "the line says whose it is"


def test_the_log_is_told_from_its_last_line(server: ServerProcess) -> None:
    fails(httpclient, server.http, "raises", "INPUT0")
    seen(server)  # so that no line comes meanwhile
    whole = get(server, "/v2/logging/recent")
    lines = whole["lines"]
    assert whole["last"] == lines[-1]["number"]
    assert [line["number"] for line in lines] == list(range(lines[0]["number"], lines[-1]["number"] + 1))
    for line in lines:
        if line["level"] == "info":
            server.until_logged(line["text"])
    warnings = get(server, "/v2/logging/recent?level=warning")["lines"]
    assert warnings == [line for line in lines if line["level"] in ("warning", "error")] and warnings
    after = lines[1]["number"]
    assert get(server, f"/v2/logging/recent?after={after}")["lines"] == lines[2:]
    assert get(server, "/v2/logging/recent?count=2")["lines"] == lines[-2:]
    assert get(server, "/v2/logging/recent?after=999999") == {"lines": [], "last": whole["last"]}
    for query in ("count=0", "count=x", "after=-1", "level=loud", "other=1"):
        assert "logging/recent" in get(server, f"/v2/logging/recent?{query}", 400)["error"]


@pytest.mark.slow
@without_front_ends
def test_lines_of_front_ends_are_told_too(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    certificate, key = Certificates(tmp_path).issue("rest")
    tls = (f"--http-tls-cert={certificate}", f"--http-tls-key={key}")
    with ServerProcess(tmp_path / "models", "--frontends=1", *tls) as process:
        host, _, port = process.http.rpartition(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(1000)  # the alert: who has sent it, has logged it

        def told() -> set[str]:
            with Http1(process.metrics) as client:
                lines = json.loads(client.request("GET", "/console/v2/logging/recent").body)["lines"]
            return {line["text"] for line in lines if "a TLS handshake failed" in line["text"]}

        (line,) = until(told)
        process.until_logged(line)
        assert f" {process.process.pid} " not in line


def test_a_table_keeps_the_last_texts_and_cuts_them() -> None:
    table = LastErrors()
    for i in range(2 * last_errors.MOST):
        table.note(Internal(f"{i} " + "x" * 2000))
        table.note(Internal("always"))
    rows = table.rows()
    assert [row["text"].split()[0] for row in rows[:3]] == ["always", "15", "14"]
    assert len(rows) == last_errors.MOST and rows[0]["count"] == 2 * last_errors.MOST
    assert max(len(row["text"]) for row in rows) < last_errors.LONGEST + 32
    table.note(Cancelled())
    table.note(
        Unavailable("[request id: 7] Exceeds maximum queue size", reason=Reason.REJECTED), refused=True
    )
    full, cancelled = table.rows()[:2]
    assert (full["text"], full["reason"], full["refused"]) == ("Exceeds maximum queue size", "REJECTED", True)
    assert (cancelled["reason"], cancelled["refused"]) == ("CANCELED", False)


def test_the_tail_of_the_log_is_bounded() -> None:
    tail = LogTail()
    for i in range(log_tail.MOST + 10):
        tail.add(i, 1, f"line {i}")
    lines = tail.since(0)
    assert [lines[0].text, lines[-1].text, len(lines)] == [
        "line 10",
        f"line {log_tail.MOST + 9}",
        log_tail.MOST,
    ]
    for i in range(400):
        tail.add(i, 3, "y" * 100_000)
    kept = sum(len(line.text) for line in tail.since(0))
    assert log_tail.KEPT_CHARACTERS // 2 < kept <= log_tail.KEPT_CHARACTERS


def test_who_is_told_the_log() -> None:
    """Nobody who merely reaches a port."""
    plain = Settings()
    restricted = Settings(http_restricted_api=(Restriction(("logging",), "x-key", "secret"),))

    def refused(log: RecentLog, admin: bool = False) -> bool:
        try:
            log.lines("", admin)
        except Exception as error:
            return type(error).__name__ == "Denied"
        return False

    assert refused(RecentLog(plain)) and refused(RecentLog(plain).at("0.0.0.0"))
    assert refused(RecentLog(plain, "127.0.0.1").at("10.0.0.7"))
    for host in ("127.0.0.1", "::1", ""):
        assert not refused(RecentLog(plain).at(host))
    assert not refused(RecentLog(plain).at("0.0.0.0"), admin=True)
    assert not refused(RecentLog(restricted).at("0.0.0.0"))
    assert not refused(RecentLog(Settings(auth_config=Path("auth.toml"))).at("0.0.0.0"))


def test_others_run_between_the_errors_of_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of models, and each text is looked at, a character at a time."""
    for i in range(20):
        write_model(tmp_path, f"m{i}", identity_config())
    with EmbeddedServer(tmp_path) as running:
        server = running.server
        app = RestApp(server.services, server.verbs, None, OriginPolicy([]))
        for model in server.repository.ready_models():
            model.counters.note_error(Internal(f"of {model.name}"))
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v2/errors",
            "raw_path": b"/v2/errors",
            "query_string": b"",
            "headers": [],
        }

        async def ask() -> tuple[int, bytes]:
            turns, body = 0, b""

            async def other() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            async def receive() -> Any:
                await trio.sleep_forever()

            async def send(message: Any) -> None:
                nonlocal body
                body += message.get("body", b"")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                await trio.lowlevel.checkpoint()  # it has begun
                await app(scope, receive, send)
                nursery.cancel_scope.cancel()
            return turns, body

        monkeypatch.setattr(slices, "SLICE_NS", -1)
        turns, body = running.run(ask)
    found = json.loads(body)["models"]
    assert {row["name"]: row["errors"][0]["text"] for row in found} == {
        f"m{i}": f"of m{i}" for i in range(20)
    }
    assert turns >= 19, "once between any two"
