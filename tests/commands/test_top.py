"""`neptrio top` against a real server, and against one that only knows the extension."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio.observe.top_view import Sample, render
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "neptrio", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_once_and_interactive(tmp_path: Path) -> None:
    write_model(tmp_path, "busy", identity_config(pairs=1))
    write_model(tmp_path, "idle", identity_config(pairs=1))
    write_model(tmp_path, "broken", 'backend: "identity" max_batch: 3')
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        ended = threading.Event()

        def load() -> None:
            tensor = httpclient.InferInput("INPUT0", [2, 16], "INT32")
            tensor.set_data_from_numpy(np.zeros((2, 16), np.int32))
            with httpclient.InferenceServerClient(server.http) as client:
                while not ended.is_set():
                    client.infer("busy", [tensor])

        def shown() -> list[str] | None:
            """The lines of an interval in which a request was answered."""
            done = top(server.http, "--once", "--interval=0.5")
            assert done.returncode == 0, done.stderr
            lines = done.stdout.splitlines()
            assert lines[2].split()[:3] == ["MODEL", "VER", "REQ/S"]
            return lines if float(lines[3].split()[2]) > 0 else None

        thread = threading.Thread(target=load)
        thread.start()
        try:
            lines = until(shown, "requests are seen")
            only = top(f"http://{server.http}/", "--once", "--interval=0.1", "--model=busy")
            wrong = top(server.grpc, "--once")
        finally:
            ended.set()
            thread.join(300)
        assert (wrong.returncode, "This port speaks gRPC" in wrong.stderr) == (1, True), wrong.stderr
        whole = "\n".join(lines)
        busy, idle = lines[3].split(), lines[4].split()
        assert busy[:2] == ["busy", "1"] and busy[4] == "2.0" and "/" in busy[5]
        assert idle[:3] == ["idle", "1", "0.0"]
        assert "busy 1: single" in whole
        # a model that failed to load is not simply missing
        assert "\nnot ready:\n  broken UNAVAILABLE " in whole and "max_batch_size" in whole
        assert "broken" not in only.stdout
        assert "idle" not in only.stdout and "busy" in only.stdout
        unknown = top(server.http, "--once", "--model=nope")
        assert unknown.returncode == 1 and "'nope' is not available" in unknown.stderr

        # without a terminal it prints one interval after the other, without what only terminals understand
        command = [sys.executable, "-m", "neptrio", "top", server.http, "--interval=0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            heads = []
            while len(heads) < 2:
                line = following.stdout.readline()
                assert line and "\x1b" not in line
                heads += [line] if line.startswith("MODEL") else []
            following.terminate()

        master, slave = pty.openpty()
        watching = subprocess.Popen(
            [sys.executable, "-m", "neptrio", "top", server.http, "--interval=0.05"],
            stdin=slave, stdout=slave, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200", "LINES": "50"},
        )  # fmt: skip
        os.close(slave)
        begin = b""
        while b"MODEL" not in begin:
            assert select.select([master], [], [], 60)[0]
            begin += os.read(master, 65536)
        os.write(master, b"\x1b[A\xe9")  # an arrow, and the begin of a character
        screen = b""
        while screen.count(b"MODEL") < 3:  # the first may have been on its way
            assert select.select([master], [], [], 60)[0]
            screen += os.read(master, 65536)
        os.write(master, b"q")
        while select.select([master], [], [], 60)[0]:
            try:
                screen += os.read(master, 65536)
            except OSError:
                break
        assert watching.wait(60) == 0
        os.close(master)
        assert begin.startswith(b"\x1b[?1049h") and screen.endswith(b"\x1b[?1049l"), (
            "the terminal is restored"
        )


def test_failures_are_shown_however_narrow_the_terminal_is() -> None:
    counts = {"count": 3, "ns": 3_000_000}
    stages = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    stat = {
        "name": "a_model_with_a_long_name", "version": "1", "inference_count": 3, "execution_count": 3,
        "inference_stats": dict.fromkeys(stages, counts),
    }  # fmt: skip
    samples = [Sample(seconds, {("m", "1"): stat}) for seconds in (1.0, 2.0)]
    whole = render("u", *samples)[2]
    for width in (200, 100, 80, 60):
        head, row = render("u", *samples, width)[2:4]
        assert head.endswith("FAIL/S  FAILED") and head.startswith("MODEL") and row.endswith(" 3")
        assert len(head) <= width or width < 62
        assert (head == whole) == (width >= len(whole))


class Other(BaseHTTPRequestHandler):
    """A server with the statistics extension that ignores query strings."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        duration = {"count": 3, "ns": 3_000_000}
        stages = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        stat = {
            "name": "m", "version": "1", "inference_count": 3, "execution_count": 3,
            "inference_stats": dict.fromkeys(stages, duration),
        }  # fmt: skip
        body = json.dumps(
            {"model_stats": [stat]} if self.path.startswith("/v2/models/stats") else []
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_other_servers_and_no_server() -> None:
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        url = f"127.0.0.1:{other.server_port}"
        try:
            done = top(url, "--once", "--interval=0.1")
            wrong = top(url, "--once", "--model=x")
        finally:
            other.shutdown()
            thread.join(300)
    assert done.returncode == 0, done.stderr
    assert "AVG REQUEST" in done.stdout and "m      1" in done.stdout
    assert wrong.returncode == 1 and "is this the HTTP port" in wrong.stderr
    with socket.socket() as nobody:  # bound, so that nobody else listens there
        nobody.bind(("127.0.0.1", 0))
        gone = top(f"127.0.0.1:{nobody.getsockname()[1]}", "--once")
    assert gone.returncode == 1 and "no answer from a server at " in gone.stderr
    assert top("ftp://x", "--once").returncode == 1
    assert top("--interval=0", "--once").returncode == 2
