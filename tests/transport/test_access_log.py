"""The access log: a line for each request, whichever way it takes; nobody waits for it, and no secret is in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from neptrio.service.access_log import MOST, PIECE, AccessLog, AccessRecord
from neptrio.service.line_file import LineFile
from neptrio.service.reopened import reopen
from tests.support.certificates import Certificates
from tests.support.gate import Gate
from tests.support.held_event import held_events
from tests.support.http import Http1, Http2
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until
from tests.test_logs import limit_files

INFER = "/v2/models/simple/infer"
SECRET = "hunter2"


def body(name: str = "r1", **more: Any) -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": [*range(16)]}
    return json.dumps({"id": name, "inputs": [tensor], **more}).encode()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors() -> list[Any]:
    made = triton_grpc.InferInput("INPUT0", [1, 16], "INT32")
    made.set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16))
    return [made]


def over_http(client: Http1 | Http2, agent: str, hypercorn: bool = False) -> list[tuple[Any, ...]]:
    """Sends requests on all ways; returns what their lines must say: status, path, model, version, id, bytes."""
    headers = {"User-Agent": agent}
    found = []

    def ask(
        method: str,
        path: str,
        sent: bytes,
        model: str | None,
        version: str | None,
        name: str | None,
        **more: str,
    ) -> None:
        reply = client.request(method, path, sent, {**headers, **more})
        line = (reply.status, path.split("?")[0], model, version, name, len(sent), len(reply.body))
        found.append((agent, method, *line))

    ask("POST", INFER, body(), "simple", "1", "r1")
    ask("POST", INFER, body("r1"), "simple", "1", "r1")
    ask("POST", INFER, body("slow"), "simple", "1", "slow", **{"Accept-Encoding": "gzip"})
    ask(
        "POST", INFER, json.dumps({"id": "bare", "inputs": []}).encode(), "simple", "1", "bare"
    )  # not submitted
    ask("POST", INFER, b"no JSON", "simple", None if hypercorn else "1", None)
    ask("POST", "/v2/models/none/infer", body(), "none", None, None)
    ask("POST", "/v2/models/simple/versions/1/infer", body(), "simple", "1", "r1")
    ask("GET", "/v2/models/simple/config", b"", "simple", None, None)
    ask("GET", f"/v2/health/ready?token={SECRET}", b"", None, None, None)
    ask("GET", "/nothing", b"", None, None, None)
    return found


def lines_of_http(found: list[dict[str, Any]], agent: str) -> list[tuple[Any, ...]]:
    fields = ("method", "status", "path", "model", "model_version", "request_id", "bytes_in", "bytes_out")
    return [(agent, *map(row.get, fields)) for row in found if row.get("user_agent") == agent]


def over_grpc(client: Any) -> None:
    client.infer("simple", tensors(), request_id="g1")
    with pytest.raises(InferenceServerException):
        client.infer("none", tensors(), request_id="g2")
    with pytest.raises(InferenceServerException):
        client.infer("simple", [], request_id="g3")
    client.get_model_config("simple")
    with Answers(client) as answers:
        client.async_stream_infer("simple", tensors(), request_id="s1")
        client.async_stream_infer("none", tensors(), request_id="s2")
        answers.result()
        answers.error()


def lines_of_grpc(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    made = []
    for row in found:
        if row["protocol"] == "gRPC":
            method = row["path"].rpartition("/")[2]
            names = (row.get("request_id"), row.get("model"), row.get("model_version"))
            made.append((method, row["grpc_status"], *names, row.get("message"), row.get("messages")))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "tls", "frontends", "hypercorn"])
def test_every_request_has_a_line(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "models", "simple", identity_config(pairs=1))
    log = tmp_path / "access"
    certificates = Certificates(tmp_path)
    flags = ["--access-log=json", f"--access-log-file={log}"]
    if kind == "tls":
        certificate, key = certificates.issue("server")
        flags += [f"--http-tls-cert={certificate}", f"--http-tls-key={key}"]
    flags += {"frontends": ["--frontends=2"], "hypercorn": ["--http-lean=false"]}.get(kind, [])
    expected = []
    with ServerProcess(tmp_path / "models", *flags) as server:
        secure = kind == "tls"
        with Http1(server.http, certificates.client() if secure else None) as first:
            expected += over_http(first, "one", kind == "hypercorn")
        if kind != "hypercorn":  # which may end a connection of HTTP/2 after a refusal
            with Http2(server.http, certificates.client(alpn="h2") if secure else None) as second:
                expected += over_http(second, "two")
        client = triton_grpc.InferenceServerClient(server.grpc)
        over_grpc(client)
        client.close()
        with Http1(server.metrics) as metrics:
            assert metrics.request("GET", "/metrics").status == 200
        # the ways that lines are about were taken
        if kind == "plain":
            with Http1(server.metrics) as metrics:
                assert metrics.request("GET", "/metrics").status == 200
    found = rows(log)
    assert sorted(lines_of_http(found, "one") + lines_of_http(found, "two"), key=repr) == sorted(
        expected, key=repr
    )
    model = None if kind == "frontends" else "simple"
    assert sorted(lines_of_grpc(found), key=repr) == sorted(
        [
            ("ModelInfer", "OK", "g1", "simple", "1", None, None),
            ("ModelInfer", "NOT_FOUND", "g2", "none", None, None, None),
            ("ModelInfer", "INVALID_ARGUMENT", "g3", "simple", "1", None, None),
            ("ModelConfig", "OK", None, model, None, None, None),
            ("ModelStreamInfer", "OK", "s1", "simple", "1", 1, None),
            ("ModelStreamInfer", "NOT_FOUND", "s2", "none", None, 2, None),
            ("ModelStreamInfer", "OK", None, None, None, None, 2),
        ],
        key=repr,
    )
    assert len(found) == len(expected) + 7  # whoever asks for metrics has none
    for row in found:
        assert row["client"] == "127.0.0.1"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["time"])
        assert row["duration_ms"] >= row.get("queue_ms", 0) + row.get("compute_ms", 0)
    infers = [row for row in found if row.get("request_id") in ("r1", "g1", "s1")]
    assert all(row["bytes_in"] > 64 and row["bytes_out"] > 64 for row in infers)
    if kind != "hypercorn":
        assert all("compute_ms" in row for row in infers)
    assert SECRET not in log.read_text()


def until_rows(path: Path, count: int) -> list[dict[str, Any]]:
    until(lambda: len(rows(path)) >= count, lambda: path.read_text())
    return rows(path)


@pytest.mark.slow
@pytest.mark.parametrize("frontends", ["--frontends=0", "--frontends=1"])
def test_requests_without_an_answer_and_what_is_no_request(tmp_path: Path, frontends: str) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate")
    log = tmp_path / "access"
    sent = body("left")
    with ServerProcess(
        tmp_path / "models", "--access-log=json", f"--access-log-file={log}", frontends
    ) as server:
        one, two = Http1(server.http), Http2(server.http)
        client = triton_grpc.InferenceServerClient(server.grpc)
        path = "/v2/models/gate/infer"
        one.start("POST", path, sent)
        gate.started()
        one.close()
        gate.go("c")
        two.start("POST", path, sent)
        gate.started()
        two.close()
        gate.go("c")
        call = client.async_infer("gate", tensors(), lambda result, error: None, request_id="left")
        gate.started()
        call.cancel()
        gate.go("c")
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("gate", tensors(), request_id="left")
        gate.started()
        client.stop_stream(cancel_requests=True)
        gate.go("c")
        with Http1(server.http) as client_of_nonsense:
            client_of_nonsense.send(b"\x01\x02 no request\r\n\r\n")
            assert client_of_nonsense.read().status in (400, 405)
        until(lambda: len(log.read_text().splitlines()) >= 6, log.read_text)
        client.close()
    found = rows(log)
    fields = ("protocol", "status", "grpc_status", "path", "request_id", "model", "message")
    service = "/inference.GRPCInferenceService"
    assert sorted(([row.get(name) for name in fields] for row in found if row["path"]), key=repr) == sorted(
        (
            ["HTTP/1.1", 499, None, path, "left", "gate", None],
            ["HTTP/2.0", 499, None, path, "left", "gate", None],
            ["gRPC", None, "CANCELLED", f"{service}/ModelInfer", "left", "gate", None],
            ["gRPC", None, "CANCELLED", f"{service}/ModelStreamInfer", "left", "gate", 1],
            ["gRPC", None, "CANCELLED", f"{service}/ModelStreamInfer", None, None, None],
        ),
        key=repr,
    )
    (nonsense,) = [row for row in found if not row["path"]]
    assert nonsense["status"] in (400, 405) and nonsense["method"] == ""


@pytest.mark.slow
def test_combined_lines_and_sighup(tmp_path: Path) -> None:
    """One line has the fields that log analysers expect in their places; the file is opened again by all processes."""
    write_model(tmp_path / "models", "simple", identity_config(pairs=1))
    log, old = tmp_path / "access", tmp_path / "old"
    flags = ["--access-log=combined", f"--access-log-file={log}", "--frontends=1"]
    with ServerProcess(tmp_path / "models", *flags) as server:
        with Http1(server.http) as client:
            assert client.request("POST", INFER, body()).status == 200
            until(lambda: log.read_text().count("\n") == 1, log.read_text)
            log.rename(old)
            server.process.send_signal(signal.SIGHUP)
            until(log.exists, "the file is there again")
            server.until_logged("the log file was opened again")
            headers = {"User-Agent": 'x"\\y', "Authorization": f"Bearer {SECRET}"}

            def again() -> bool:  # the front end opens its file a moment after the engine
                assert client.request("POST", f"{INFER}?token={SECRET}", body('i"d\n'), headers).status == 200
                return log.read_text() != ""

            until(again)
    (first,) = {line for line in old.read_text().splitlines() if '"r1"' in line}
    assert re.fullmatch(
        r"127\.0\.0\.1 - - \[\d\d/[A-Z][a-z][a-z]/\d{4}:\d\d:\d\d:\d\d \+0000\] "
        r'"POST /v2/models/simple/infer HTTP/1\.1" 200 \d+ "-" "-" \d+ \d+\.\d{6} "r1" "simple" 1 -',
        first,
    )
    last = log.read_text().splitlines()[-1]
    assert '"POST /v2/models/simple/infer HTTP/1.1" 200 ' in last
    assert r'"x\"\\y"' in last and r'"i\"d\n"' in last
    assert SECRET not in log.read_text() + old.read_text()


def test_a_log_that_cannot_be_opened_again_keeps_no_other_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.append(AccessLog("combined", str(tmp_path / name / "log")))
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    (tmp_path / "second").mkdir()
    assert reopen(*logs)
    assert (tmp_path / "second" / "log").exists()
    (said,) = [record.getMessage() for record in caplog.records if "SIGHUP" in record.getMessage()]
    assert "cannot be opened again, it goes on as it was" in said and str(tmp_path / "first" / "log") in said
    for one in logs:
        one.close()


@pytest.mark.slow
def test_a_named_pipe_without_a_reader_holds_nobody(tmp_path: Path) -> None:
    """Opening one for writing waits for its reader: neither the start nor the loop does."""
    write_model(tmp_path / "models", "simple", identity_config(pairs=1))
    names = {"--log-file": "log", "--access-log-file": "access", "--audit-log": "audit"}
    flags = [f"{flag}={tmp_path / name}" for flag, name in names.items()]
    with ServerProcess(tmp_path / "models", "--access-log=json", *flags, "--frontends=1") as server:
        for name in names.values():
            (tmp_path / name).rename(tmp_path / f"old-{name}")
            os.mkfifo(tmp_path / name)
        server.process.send_signal(signal.SIGHUP)
        said = (tmp_path / "old-log").read_text
        told = "cannot be opened again, it goes on as it was: [Errno 6] nobody reads this named pipe"
        until(lambda: said().count(told) == 5, said)  # log and access log by both processes
        with Http1(server.http) as client:
            assert client.request("POST", INFER, body()).status == 200
        until(lambda: '"r1"' in (tmp_path / "old-access").read_text(), "the old file goes on")
    for flag, name in names.items():
        command = [sys.executable, "-m", "neptrio", str(tmp_path / "models"), "--access-log=json"]
        ended = subprocess.run(
            [*command, f"{flag}={tmp_path / name}"], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode != 0
        assert f"'{tmp_path / name}' cannot be opened: nobody reads this named pipe" in ended.stderr, (
            ended.stderr
        )
        assert "Traceback" not in ended.stderr


def filled(access: AccessLog, **fields: Any) -> AccessRecord:
    record = access.begin("HTTP/1.1", "10.0.0.1", "GET", "/v2")
    for name, value in fields.items():
        setattr(record, name, value)
    record.end()
    return record


def test_nobody_waits_for_the_log_and_what_is_left_out_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    access = AccessLog("json", str(path))
    many = 2 * MOST
    for i in range(many):  # a log that waits for its reader never comes to the end
        filled(access, id=str(i))
    os.set_blocking(reader, True)
    found: list[str] = []
    with os.fdopen(reader) as log:
        reading = threading.Thread(target=lambda: found.extend(log), daemon=True)
        reading.start()
        access.close(60)
        reading.join(60)
        assert not reading.is_alive(), "the pipe is still open for writing"
    assert access.left_out > 0
    assert len(found) == many - access.left_out
    ids = [int(json.loads(line)["request_id"]) for line in found]
    assert ids == sorted(ids)
    said = re.findall(r"(\d+) lines were left out", caplog.text)
    assert sum(map(int, said)) == access.left_out


def test_a_log_that_is_closed_just_before_it_writes_ends(tmp_path: Path) -> None:
    path, before = tmp_path / "access", threading.enumerate()
    with held_events() as events:
        access = AccessLog("json", str(path))
    filled(access)
    assert events.reached.wait(60)
    access.close(0)
    events.go_on()
    until(lambda: set(threading.enumerate()) <= {*before}, "the writer ends", 30)
    assert len(rows(path)) == 1
    access.close()


def test_a_request_has_one_line_whatever_clients_send(tmp_path: Path) -> None:
    for form in ("json", "combined"):
        path = tmp_path / form
        access = AccessLog(form, str(path))
        record = filled(
            access, target='/v2/"x"\x1b[2J\n' + "y" * 999, method="GE\nT", agent=b"\r\nz", id="a\u2028b\n"
        )
        record.end()  # once is enough
        access.close(60)
        text = path.read_text()
        assert text.isascii() and text.count("\n") == 1 and text.endswith("\n")
        assert "\x1b" not in text and len(text) < 1500
        assert len(text.splitlines()) == 1


def test_a_version_is_one_field_of_a_combined_line(tmp_path: Path) -> None:
    """It stands between no quotes, so nothing in it may end it: what follows would be taken for the status of gRPC."""
    path = tmp_path / "access"
    access = AccessLog("combined", str(path))
    filled(access, model="m", version="1 OK", grpc="INVALID_ARGUMENT")
    access.close(60)
    assert path.read_text().endswith(' "m" 1\\x20OK INVALID_ARGUMENT\n')


@pytest.mark.parametrize("form", ["json", "combined"])
@pytest.mark.parametrize("character", ["x", '"', "\x01", " ", "\u4e2d", "\U0001f600"])
def test_a_line_is_written_by_one_call_whatever_is_in_it(tmp_path: Path, form: str, character: str) -> None:
    """A pipe takes PIECE bytes without those of another process in between, and lines of front ends stay whole."""
    path = tmp_path / form
    access = AccessLog(form, str(path))
    names = ("target", "method", "id", "model", "version")
    filled(access, agent=b"\xff" * 4096, grpc="RESOURCE_EXHAUSTED", **dict.fromkeys(names, character * 999))
    access.close(60)
    text = path.read_text()
    assert len(text) <= PIECE and text.count("\n") == 1
    if form == "json":
        found = json.loads(text)["request_id"]
        assert len(found) >= 50 and set(found) == {character}


def test_what_waits_is_no_larger_than_what_is_written(tmp_path: Path) -> None:
    """While a pipe is full, thousands of records wait, each of them with what a client has sent."""
    path = tmp_path / "json"
    access = AccessLog("json", str(path))
    large = "x" * (1 << 20)
    record = filled(
        access,
        target=f"/v2/models/m/versions/3/infer/{large}?{large}",
        agent=large.encode(),
        **dict.fromkeys(("method", "id"), large),
    )
    plain = filled(access, target=f"/v2?{large}", model=large, version=large)
    access.close(60)
    assert all(
        len(text) <= 2048
        for one in (record, plain)
        for text in (one.target, one.agent, one.method, one.id, one.model, one.version)
    )
    first, second = rows(path)
    assert (first["model"], first["model_version"]) == ("m", "3")
    assert {len(first[name]) for name in ("path", "user_agent", "method", "request_id")} == {300}
    assert second["path"] == "/v2" and len(second["model"]) == len(second["model_version"]) == 300


def test_a_stream_that_takes_nothing_now_is_waited_for_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a program that has more than a thousand files open, where select() ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    monkeypatch.setattr(sys, "stderr", open(writer, "wb", buffering=0))  # noqa: SIM115
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    taken = [os.dup(writer)]
    while taken[-1] < 1100:
        taken.append(os.dup(writer))
    file = LineFile("stderr", 0o640)
    for descriptor in taken:
        os.close(descriptor)
    sys.stderr.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lines = (b"x" * 99 + b"\n") * 2000

    def write() -> None:
        with contextlib.closing(file):
            file.write(lines)

    writing = threading.Thread(target=write)
    writing.start()
    found = b""
    while piece := os.read(reader, 4096):
        found += piece
    writing.join(60)
    os.close(reader)
    assert found == lines


def test_after_a_full_disk_a_record_has_its_own_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access"
    access = AccessLog("json", str(path))
    for name in ("first", "lost", "last"):
        size = path.stat().st_size
        if name == "lost":
            limit_files(size + 20)
        try:
            filled(access, id=name)
            if name == "lost":
                until(lambda: "--access-log-file cannot be written: File too large" in caplog.text)
            else:
                until(lambda name=name: f'"{name}"' in path.read_text())
        finally:
            limit_files(-1)
    access.close()
    first, cut, last = path.read_text().splitlines()
    assert len(cut) == 20 and access.lost == 1
    assert (json.loads(first)["request_id"], json.loads(last)["request_id"]) == ("first", "last")
    assert "1 lines were left out" in caplog.text


def test_the_times_of_a_request_and_its_model_by_the_path(tmp_path: Path) -> None:
    path = tmp_path / "access"
    access = AccessLog("json", str(path))
    filled(access, target="/v2/models/a/versions/3/generate_stream?x=1")
    filled(access, target="/v2/models/stats")
    filled(access, target="/v2/repository/models/b/load")
    access.close(60)
    assert [(row.get("model"), row.get("model_version")) for row in rows(path)] == [
        ("a", "3"),
        (None, None),
        ("b", None),
    ]


@pytest.mark.parametrize("flag", ["--access-log=yes", "--access-log-file=/nowhere/access"])
def test_a_wrong_flag_ends_the_start(tmp_path: Path, flag: str) -> None:
    write_model(tmp_path, "simple", identity_config())
    with pytest.raises(AssertionError, match=r"access-log|/nowhere"):
        ServerProcess(tmp_path, "--access-log=json", flag)
