"""A change is answered when every front end knows of it, whichever port it came by."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from tests.frontend.test_front_ends import COUNT, pids
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow
FLAGS = (f"--frontends={COUNT}", "--model-control-mode=explicit")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "m", identity_config())
    return tmp_path / "models"


@contextmanager
def one_stopped(server: ServerProcess) -> Iterator[None]:
    """One front end takes nothing; it would be killed for that after 10 s."""
    stopped = pids(server)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert stopped in pids(server)


def level(client: Http1, path: str) -> Callable[[], int]:
    """What the engine says of itself, whoever else knows it."""
    return lambda: int(json.loads(client.request("GET", path).body)["log_verbose_level"])


def test_by_the_admin_listener(repository: Path) -> None:
    with (
        ServerProcess(repository, *FLAGS, "--admin-address=127.0.0.1:0") as server,
        Http1(server.admin) as admin,
        Http1(server.admin) as other,
        grpcclient.InferenceServerClient(server.admin) as client,
        ThreadPoolExecutor() as pool,
    ):
        logs = level(other, "/v2/logging")
        with one_stopped(server):
            admin.start("POST", "/v2/repository/models/m/load")
            until(lambda: b"READY" in other.request("POST", "/v2/repository/index").body, "it is loaded")
            grpc = pool.submit(client.update_log_settings, {"log_verbose_level": 1})
            until(lambda: logs() == 1, "the engine has taken it")
            assert select.select([admin.sock], [], [], 0)[0] == [] and not grpc.done()
        assert admin.read().status == 200 and grpc.result(60)


@pytest.mark.parametrize("path", ["/console/v2/logging", "/console/v2/trace/setting"])
def test_by_the_console(repository: Path, path: str) -> None:
    with (
        ServerProcess(repository, *FLAGS) as server,
        Http1(server.metrics) as console,
        Http1(server.metrics) as other,
    ):
        logging = path.endswith("logging")
        body = {"log_verbose_level": 1} if logging else {"trace_rate": "7"}
        with one_stopped(server):
            console.start("POST", path, json.dumps(body).encode())
            until(
                lambda: json.loads(other.request("GET", path).body).items() >= body.items(),
                "the engine has taken it",
            )
            assert not logging or select.select([console.sock], [], [], 0)[0] == []
        assert console.read().status == 200
