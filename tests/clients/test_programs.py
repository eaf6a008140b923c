"""kserve's clients, grpcio from the public .proto files, and Node's grpc-js and fetch: each a program of its own, which
checks what it is answered and prints the verbs that it has not used."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.servers import example_server
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(__file__).resolve().parent / "node"
pytest.importorskip("schemathesis", reason="run by make test-clients")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with example_server("simple", flags=["--allow-client-shm=true"]) as process:
        yield process


def left(*command: str | Path) -> dict[str, list[str]]:
    """Runs a program; the verbs that it has not used."""
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("kserve") is None, reason="kserve has no package for this machine"
)
def test_kserve(server: ServerProcess) -> None:
    program = (sys.executable, "-m", "tests.clients.kserve_verbs")
    assert left(*program, server.http, server.grpc) == {"rest": [], "grpc": []}


def test_grpcio(server: ServerProcess) -> None:
    assert left(sys.executable, "-m", "tests.clients.grpcio_verbs", server.grpc) == {"grpc": []}


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node on this machine")
@pytest.mark.skipif(not (NODE / "node_modules" / "installed.txt").exists(), reason="npm installed nothing")
def test_node(server: ServerProcess) -> None:
    assert left("node", NODE / "verbs.mjs", server.http, server.grpc) == {"grpc": [], "rest": []}
