"""The audit log: who changed what, who was refused, over both protocols; nobody waits for it."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from neptrio.errors import Denied, Internal, Unauthenticated
from neptrio.service.audit import EVENTS, HELD_BYTES, REFUSALS_PER_SECOND, AuditLog
from neptrio.transport.header_policy import METHOD_CATEGORIES, METHOD_SCOPES, VERB_CATEGORIES, VERB_SCOPES
from tests.support.http import Http1, Http2
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until
from tests.test_logs import limit_files
from tests.transport.test_tokens import ask, auth, row

INFER = "/v2/models/simple/infer"
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(path: Path) -> list[tuple[Any, ...]]:
    return [(r["event"], r["outcome"], r["token"], r.get("model"), r.get("target")) for r in rows(path)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lean", "hypercorn", "http2"])
def test_what_was_changed_and_refused_over_rest(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    tokens, audit = tmp_path / "auth.toml", tmp_path / "audit"
    tokens.write_text(row("boss", "admin", "operate", "read") + row("app", "infer"))
    lean = ["--http-lean=false"] if kind == "hypercorn" else []
    flags = [*EXPLICIT, *lean, f"--auth-config={tokens}", f"--audit-log={audit}"]
    with ServerProcess(tmp_path / "models", *flags) as server:
        with (Http2 if kind == "http2" else Http1)(server.http) as client:
            assert ask(client, "boss", "POST", "/v2/repository/models/simple/load").status == 200
            assert (
                ask(client, "boss", "POST", "/v2/repository/models/none/load").status == 500
            )  # as a Triton server
            assert ask(client, "app", "POST", "/v2/repository/models/simple/unload").status == 403
            assert ask(client, "boss", "POST", "/v2/logging", b'{"log_info": true}').status == 200
            assert ask(client, "boss", "POST", "/v2/trace/setting", b"{}").status == 200
            assert ask(client, "boss", "POST", "/v2/systemsharedmemory/region/r/unregister").status == 200
            assert ask(client, "boss", "GET", "/v2/logging").status == 200
            assert ask(client, "boss", "GET", "/v2").status == 200
            assert ask(client, "boss", "POST", INFER, b"{}").status == 403
            assert ask(client, "guess", "POST", INFER, b"{}").status == 401
            assert ask(client, "app", "POST", INFER, b"{}").status == 400
            assert ask(client, None, "GET", "/v2/models/simple/config").status == 401
    assert plain(audit) == [
        ("load", "ok", "boss", "simple", None),
        ("load", "failed", "boss", "none", None),
        ("unload", "refused", "app", "simple", None),
        ("logging", "ok", "boss", None, None),
        ("trace", "ok", "boss", None, None),
        ("shared-memory-unregister", "ok", "boss", None, "r"),
        ("infer", "refused", "boss", "simple", None),
        ("infer", "refused", None, "simple", None),
        ("model_config", "refused", None, "simple", None),
    ]
    for found in rows(audit):
        assert found["protocol"] == "http"
        assert found["address"] == "127.0.0.1"
        assert ("error" in found) is (found["outcome"] != "ok")
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    assert "guess" not in audit.read_text()


def test_what_was_changed_and_refused_over_grpc(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    tokens, audit = tmp_path / "auth.toml", tmp_path / "audit"
    tokens.write_text(row("boss", "admin", "operate", "read") + row("app", "infer", models='models = ["x"]'))
    with ServerProcess(
        tmp_path / "models", *EXPLICIT, f"--auth-config={tokens}", f"--audit-log={audit}"
    ) as server:
        client = triton_grpc.InferenceServerClient(server.grpc)
        boss, app = auth("boss"), auth("app")
        client.load_model("simple", headers=boss)
        with pytest.raises(InferenceServerException):
            client.load_model("none", headers=boss)
        with pytest.raises(InferenceServerException):
            client.unload_model("simple", headers=app)
        client.get_log_settings(headers=boss)
        client.update_log_settings({"log_info": True}, headers=boss)
        client.update_trace_settings("simple", {"trace_rate": "5"}, headers=boss)
        client.unregister_system_shared_memory("r", headers=boss)
        with pytest.raises(InferenceServerException):
            client.infer("simple", identity_inputs(), headers=app)
        with pytest.raises(InferenceServerException):
            client.infer("simple", identity_inputs())
        with Answers(client, headers=app) as answers:
            client.async_stream_infer("simple", identity_inputs())
            answers.error()
        client.close()
    assert plain(audit) == [
        ("load", "ok", "boss", "simple", None),
        ("load", "failed", "boss", "none", None),
        ("unload", "refused", "app", None, None),
        ("logging", "ok", "boss", None, None),
        ("trace", "ok", "boss", "simple", None),
        ("shared-memory-unregister", "ok", "boss", None, "r"),
        ("ModelInfer", "refused", "app", "simple", None),
        ("ModelInfer", "refused", None, None, None),
        ("ModelInfer", "refused", "app", "simple", None),
    ]
    assert {found["protocol"] for found in rows(audit)} == {"grpc"}


def test_web_pages_that_were_refused_and_the_log_on_standard_error(tmp_path: Path) -> None:
    write_model(tmp_path, "simple", identity_config())
    with ServerProcess(tmp_path, "--audit-log=stderr") as server:
        with Http1(server.http) as client:
            headers = {"Origin": "https://evil.example"}
            assert client.request("POST", "/v2/logging", b"{}", headers).status == 403
        server.until_logged('"event": "logging", "outcome": "refused"')


def test_sighup_opens_the_audit_log_again(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    audit = tmp_path / "audit"
    with ServerProcess(tmp_path / "models", f"--audit-log={audit}") as server:
        audit.rename(tmp_path / "old")
        server.process.send_signal(signal.SIGHUP)
        server.until_logged("the log file was opened again")
        with Http1(server.http) as client:
            assert client.request("POST", "/v2/logging", b"{}").status == 200
    assert plain(audit) == [("logging", "ok", None, None, None)]
    assert not (tmp_path / "old").read_text()


def test_nobody_waits_for_the_log_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = AuditLog(str(path))
    many = 3 * HELD_BYTES // 100
    for i in range(many):  # a log that waits for its reader never comes to the end
        audit.record("logging", "http", "10.0.0.1", "a" * 20, error=Internal(f"{i}"))
    os.set_blocking(reader, True)
    found: list[str] = []
    with os.fdopen(reader) as log:
        reading = threading.Thread(target=lambda: found.extend(log))
        reading.start()
        until(lambda: not audit.held, lambda: audit.held)
        audit.record("logging", "http", "10.0.0.1", "")  # the next record tells of those that were left out
        audit.close(60)
        reading.join()
    # the writer may make room in the middle of the records: some are left out here, some there
    told = left_out = 0
    for record in map(json.loads, found):
        left_out += record.get("left_out_before", 0)
        told += record.get("left_out_before", 0)
        if "error" in record:
            assert int(record["error"]) == told
            told += 1
    assert told == many and left_out


def test_refusals_are_bounded_and_changes_are_not(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path))
    for _ in range(20 * REFUSALS_PER_SECOND):
        audit.record("infer", "http", "10.0.0.1", "", error=Unauthenticated("no"))
    for _ in range(2 * REFUSALS_PER_SECOND):
        audit.record("logging", "http", "10.0.0.1", "x", error=None)
    audit.record("infer", "http", "10.0.0.1", "", error=Internal("of another kind"))
    audit.record("infer", "http", "10.0.0.1", "")
    audit.close(60)
    found = rows(path)
    refused = [each for each in found if each["outcome"] == "refused"]
    assert REFUSALS_PER_SECOND <= len(refused) < 20 * REFUSALS_PER_SECOND
    assert len(found) - len(refused) == 2 * REFUSALS_PER_SECOND
    assert sum(each.get("left_out_before", 0) for each in found) == 20 * REFUSALS_PER_SECOND - len(refused)


def test_a_record_is_one_line_whatever_clients_send(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path))
    audit.record("infer", "http", "a", "", model='x"}\n{"event": "load"' + "y" * 9999, error=Denied("n\no"))
    audit.close(60)
    (found,) = rows(path)
    assert found["event"] == "infer"
    assert len(found["model"]) == 300


def test_every_change_has_an_event() -> None:
    changing = {verb for verb, scopes in VERB_SCOPES.items() if scopes[-1] in ("operate", "admin")}
    assert changing - {"trace_recent", "errors", "logging_recent"} == {
        name for name in EVENTS if name in VERB_CATEGORIES
    }
    methods = {path.rpartition("/")[2] for path in METHOD_CATEGORIES}
    calls = {method for method, scopes in METHOD_SCOPES.items() if scopes[-1] in ("operate", "admin")}
    assert calls == {name for name in EVENTS if name in methods}


def test_after_a_full_disk_a_record_has_its_own_line_and_says_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = AuditLog(str(tmp_path / "audit"))
    for name in ("first", "lost", "last"):
        size = (tmp_path / "audit").stat().st_size
        if name == "lost":
            limit_files(size + 20)
        try:
            made.record("logging", "http", "127.0.0.1:1", "", model=name)
            if name == "lost":
                until(lambda: "--audit-log cannot be written: File too large" in caplog.text)
            else:
                until(lambda name=name: f'"{name}"' in (tmp_path / "audit").read_text())
        finally:
            limit_files(-1)
    made.close()
    first, cut, last = (tmp_path / "audit").read_text().splitlines()
    assert len(cut) == 20
    assert (json.loads(first)["model"], json.loads(last)["model"]) == ("first", "last")
    assert json.loads(last)["left_out_before"] == 1
