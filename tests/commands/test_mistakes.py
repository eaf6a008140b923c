"""What commands say of their users' mistakes and of strangers' files and answers: a sentence, never a traceback."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from neptrio import commands
from neptrio.traces.export import GROUPS
from tests.support.waiting import until

PART = {
    "model_name": "m",
    "model_version": 1,
    "id": 1,
    "timestamps": [{"name": "HTTP_RECV_START", "ns": 1000}, {"name": "REQUEST_START", "ns": 5000},
                   {"name": "REQUEST_END", "ns": 9000}, {"name": "HTTP_SEND_START", "ns": 9500},
                   {"name": "HTTP_SEND_END", "ns": 9900}],
}  # fmt: skip
ASKING = (
    ["sequences", "m", "--url"],
    ["top", "--once", "--interval=0.001"],
    ["explain", "m", "--url"],
    ["explain", "m", "--plot=/dev/null", "--url"],
    ["trace", "replay", "FILE", "--url"],
)


@contextmanager
def stranger(status: int, body: bytes, whole: bool = True) -> Iterator[str]:
    """The address of an HTTP server that always answers this; not `whole`: it promises more and ends the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + (not whole)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def told(capsys: pytest.CaptureFixture[str], command: list[str], url: str, tmp_path: Path) -> str:
    """What a command that fails says of this server."""
    (tmp_path / "t").write_text(json.dumps([PART]))
    arguments = [str(tmp_path / "t") if one == "FILE" else one for one in command]
    assert commands.run(arguments[0], [*arguments[1:], url]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def asleep(pid: int) -> bool:
    """Whether the main thread of a process waits in the kernel."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "host:port",
        "host:99999999",
        "a b",
        "http://",
        "ftp://host",
        "a..b:8000",
        f"{'x' * 64}:8000",
    ],
)
def test_what_is_no_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], url: str
) -> None:
    assert f"'{url}' is no" in told(capsys, command, url, tmp_path)


@pytest.mark.parametrize(
    "url", ["localhost", ":8001", "::1", "host:port", "host:8001/x", "a..b:8001", "8001"]
)
def test_what_is_no_address_of_grpc(capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str) -> None:
    command = ["trace", "replay", "FILE", "-i", "grpc", "--url"]
    error = told(capsys, command, url, tmp_path)
    assert f"'{url}' is no gRPC address: expected HOST:PORT or [IPV6]:PORT" in error


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize("token", ["sec\nret", "sécret", "sec\x01ret"])
def test_a_token_that_no_header_can_have(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    token: str,
) -> None:
    """It is not shown: somebody else may read the output."""
    monkeypatch.setenv("NEPTRIO_TOKEN", token)
    error = told(capsys, command, "127.0.0.1:1", tmp_path)
    assert "NEPTRIO_TOKEN holds no token" in error and "ret" not in error.replace(str(tmp_path), "")


@pytest.mark.parametrize("command", ASKING[:-1], ids=" ".join)
def test_nobody_listens(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    """In the same words whoever asks."""
    assert "error: no answer from a server at 127.0.0.1:1: " in told(capsys, command, "127.0.0.1:1", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize(
    ("status", "body", "whole"),
    [
        (200, b"<html>", True),
        (200, b"[]", True),
        (200, b'{"model_stats": [{"name": "m"}], "sequences": [{}]}', True),
        (200, b"\xff\xfe", True),
        (200, b"[" * 100_000, True),
        (200, b"{", False),
        (404, b"{}", True),
        (500, b"[1]", True),
    ],
    ids=lambda value: str(value)[:20],
)
def test_answers_of_what_is_no_inference_server(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
    status: int,
    body: bytes,
    whole: bool,
) -> None:
    with stranger(status, body, whole) as url:
        if command[0] != "trace" or not body.startswith(b'{"'):  # whose first answer may be any object
            told(capsys, command, url, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '[{"id": 1, "x": ' + "[" * 200_000 + "]" * 200_000 + "}]",
        '[{"id": 1, "model_name": "m", "timestamps": [{"name": "REQUEST_START", "ns": 1e999}]}]',
        json.dumps([{**PART, "timestamps": [{"name": "REQUEST_START", "ns": 1 << 70}]}]),
        json.dumps([{**PART, "timestamps": [{"name": "REQUEST_START", "ns": -1}]}]),
    ],
    ids=["nested", "infinite", "large", "negative"],
)
def test_trace_files_with_what_nobody_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "t").write_text(text)
    (tmp_path / "models").mkdir()
    for action in ("summary", "export", "view"):
        assert commands.run("trace", [action, str(tmp_path / "t")]) == 0
        assert "warning: " in capsys.readouterr().err
    memory = ["--memory", str(tmp_path / "t"), f"--model-repository={tmp_path / 'models'}"]
    assert commands.run("explain", memory) == 1
    assert "warning: " in capsys.readouterr().err


def test_traces_that_lie_deep_below_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Children stand before their parents, as in a Triton server's files."""
    deep = GROUPS - 10
    parts = [{**PART, "id": number, "parent_id": number - 1} for number in range(deep, 0, -1)]
    (tmp_path / "t").write_text(json.dumps(parts))
    assert commands.run("trace", ["summary", str(tmp_path / "t")]) == 0
    assert commands.run("trace", ["export", "-o", str(tmp_path / "out"), str(tmp_path / "t")]) == 0
    assert not capsys.readouterr().err
    drawn = json.loads((tmp_path / "out").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "request" for event in drawn) == deep


def test_a_page_that_cannot_be_written_is_told_before_the_measurement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before the server is asked for the first time."""
    for place in (tmp_path / "gone" / "page.html", tmp_path):
        assert commands.run("explain", ["m", f"--plot={place}", "--url=127.0.0.1:1"]) == 1
        assert f"error: '{place}' cannot be written" in capsys.readouterr().err


def test_an_interval_that_cannot_be_waited(capsys: pytest.CaptureFixture[str]) -> None:
    for interval in ("0", "-1", "nan", "inf", "1e300"):
        assert commands.run("top", [f"--interval={interval}", "127.0.0.1:1"]) == 2
        assert "--interval must be above 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check", "MODELS"], ["token", "name"], ["trace", "export", "MODELS/t"]])
def test_an_output_that_is_full(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "t").write_text(json.dumps([PART]))
    arguments = [one.replace("MODELS", str(tmp_path)) for one in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "neptrio", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*ASKING, ["trace", "replay", "FILE", "--protocol=grpc", "--url"]], ids=" ".join
)
def test_who_asks_a_server_that_does_not_answer_can_be_interrupted(
    tmp_path: Path, command: list[str]
) -> None:
    tensor = {"name": "x", "dtype": "FP32", "data": "1,2", "shape": "2"}
    (tmp_path / "t").write_text(
        json.dumps([PART, {**PART, "activity": "TENSOR_QUEUE_INPUT", "tensor": tensor}])
    )
    arguments = [str(tmp_path / "t") if one == "FILE" else one for one in command]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-m", "neptrio", *arguments, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as asking:
            try:
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(1)
                    # a signal in the moment between Python's last look for one and its wait is seen after the wait only
                    until(lambda: asleep(asking.pid), "it waits for the answer")
                    asking.send_signal(signal.SIGINT)
                    _, error = asking.communicate(timeout=60)
            finally:
                asking.kill()
    assert asking.returncode == (0 if command[0] == "top" else 130)
    assert "Traceback" not in error
