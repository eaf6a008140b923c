"""Front ends that are killed, stopped or cannot be started: the server goes on, and nobody waits for them for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tritonclient.http as httpclient

from tests.frontend.test_front_ends import COUNT, children, front_of, pids
from tests.support.http import Http1
from tests.support.no_descriptors import no_descriptors
from tests.support.repository import identity_config, write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess
from tests.support.waiting import until

FRONTS = f"--frontends={COUNT}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "m", identity_config())
    return tmp_path / "models"


def with_constant(folder: Path, name: str, seconds: float) -> dict[str, str]:
    """The environment of a server whose engine has another constant."""
    return with_site(folder, f"from neptrio.frontend import engine\nengine.{name} = {seconds}\n")


def template(server: ServerProcess) -> int:
    """The process that front ends are forked from."""
    (found,) = [pid for pid, name in children(server) if name == "neptrio:fronts"]
    return found


@pytest.mark.slow
def test_a_killed_template_is_started_again(repository: Path) -> None:
    with ServerProcess(repository, FRONTS) as server:
        old = pids(server)
        for pid in (template(server), *old):
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(pids(server)) - set(old)) == COUNT, server.log)
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("m")


@pytest.mark.slow
def test_a_front_end_that_cannot_be_started_is_tried_again(repository: Path) -> None:
    with ServerProcess(repository, FRONTS) as server:
        old = pids(server)
        with no_descriptors(server.process.pid):
            os.kill(old[0], signal.SIGKILL)
            server.until_logged("cannot be started")
        until(lambda: len(set(pids(server)) - {old[0]}) == COUNT, server.log)
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("m")


@pytest.mark.slow
def test_a_stopped_front_end_does_not_hold_loads(repository: Path, tmp_path: Path) -> None:
    env = with_constant(
        tmp_path, "ANNOUNCE_SECONDS", 5
    )  # which the other does not take on a slow machine either
    flags = (FRONTS, "--model-control-mode=explicit")
    with (
        ServerProcess(repository, *flags, env=env, failures="is killed") as server,
        Http1(server.http) as client,
    ):
        assert client.request("GET", "/v2/health/live").status == 200
        mine = front_of(server, client.sock.getsockname())
        (stopped,) = set(pids(server)) - {mine}
        os.kill(stopped, signal.SIGSTOP)
        assert client.request("POST", "/v2/repository/models/m/load").status == 200
        server.until_logged(f"(process {stopped}) is killed: it has not taken what changed within 5 s")
        until(lambda: len(set(pids(server)) - {stopped}) == COUNT, server.log)
        assert mine in pids(server)


@pytest.mark.slow
def test_the_pause_before_a_front_end_starts_again_does_not_delay_the_exit(
    repository: Path, tmp_path: Path
) -> None:
    env = with_constant(tmp_path, "FIRST_PAUSE", 3600)
    with ServerProcess(repository, FRONTS, "--exit-timeout-secs=3600", env=env) as server:
        os.kill(pids(server)[0], signal.SIGKILL)
        server.until_logged("the next starts in 3600 s")
        assert server.stop() == 0
