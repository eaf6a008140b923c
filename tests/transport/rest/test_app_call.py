"""Calls of the app: what hosts it is imported while the server already serves, which may fail; and who leaves before one begins."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from neptrio.loop.socket_writer import SocketWriter
from neptrio.transport.rest.app_call import AppCalls
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.server import ServerProcess
from tests.support.waiting import until

# fails as an import does without descriptors, until the file beside it is there
HYPERCORN = """
import pathlib, sys
here = pathlib.Path(__file__).parent.parent
if not (here / "ready").exists():
    raise OSError(24, "Too many open files")
sys.path.remove(str(here))
del sys.modules["hypercorn"]
import hypercorn
"""


def test_an_import_that_fails_is_answered_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "hypercorn").mkdir()
    (tmp_path / "hypercorn/__init__.py").write_text(HYPERCORN)
    (tmp_path / "models").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with ServerProcess(tmp_path / "models", env=env) as server:
        server.until_logged("hypercorn could not be imported")
        with Http1(server.http) as client:
            reply = client.request("GET", "/v2")
            assert reply.status == 500
            assert json.loads(reply.body) == {"error": "internal error: hypercorn could not be imported"}
            (tmp_path / "ready").touch()
            assert json.loads(client.request("GET", "/v2").body)["name"] == "triton"


@pytest.mark.slow
def test_an_app_that_asks_behind_the_end_is_told(
    http_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client resets its connection while answers of earlier requests still leave, and before the app looks for its end."""
    with EmbeddedServer(http_repository) as server, Http1(server.http) as client:
        assert client.request("GET", "/v2").status == 200
        begun, told = threading.Event(), threading.Event()
        leaving, left = trio.Event(), trio.Event()

        async def run(_: Any, port: Any, exchange: Any, *args: Any) -> None:
            begun.set()
            await leaving.wait()
            await exchange.disconnected.wait()
            told.set()
            left.set()

        async def drained(_: Any) -> None:
            leaving.set()
            await left.wait()  # the connection gives up after CLOSE_SECONDS

        monkeypatch.setattr(AppCalls, "run", run)
        monkeypatch.setattr(SocketWriter, "drained", drained)
        client.start("GET", "/v2")
        until(begun.is_set, "the call has begun")
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        until(told.is_set, "the app knows that its client has left")
