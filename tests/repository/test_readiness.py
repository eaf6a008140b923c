"""What makes a server that stays up not ready: a repository that is not there, a model without a version to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


def status(server: ServerProcess, path: str) -> int:
    with Http1(server.http) as client:
        return int(client.request("GET", path).status)


@pytest.mark.slow
def test_a_missing_repository_leaves_the_server_up_and_not_ready(tmp_path: Path) -> None:
    with ServerProcess(
        tmp_path / "nowhere", "--exit-on-error=false", failures="failed to open model repository"
    ) as server:
        assert status(server, "/v2/health/live") == 200
        assert status(server, "/v2/health/ready") == 400
        with grpcclient.InferenceServerClient(server.grpc) as client:
            assert client.is_server_live() and not client.is_server_ready()
        server.until_logged(f"failed to open model repository '{tmp_path / 'nowhere'}': no such folder")


def test_a_polled_repository_may_come_later(tmp_path: Path) -> None:
    repository = tmp_path / "later"
    options: dict[str, Any] = {"model_control_mode": "poll", "repository_poll_secs": 3600.0}
    with EmbeddedServer(repository, exit_on_error=False, **options) as server:
        manager = server.server.repository
        assert not manager.all_ready()
        write_model(repository, "m", identity_config())
        server.run(manager.poll_once)
        assert manager.all_ready() and set(manager.latest) == {"m"}


@pytest.mark.slow
def test_a_model_without_a_version_is_not_ready(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    folder = write_model(tmp_path, "empty", identity_config())
    (folder / "1").rmdir()
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    with ServerProcess(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        assert client.is_model_ready("good")
        assert status(server, "/v2/health/ready") == 400
        client.unload_model("empty")
        assert status(server, "/v2/health/ready") == 200, "nobody wants it any more"
        with pytest.raises(InferenceServerException, match="at least one version must be available"):
            client.load_model("empty")
        assert status(server, "/v2/health/ready") == 400
        written = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text("no configuration")
        with pytest.raises(InferenceServerException):
            client.load_model("empty")
        assert status(server, "/v2/health/ready") == 400, "another failure gives it no version"
        (folder / "config.pbtxt").write_text(written)
        (folder / "1").mkdir()
        client.load_model("empty")
        assert status(server, "/v2/health/ready") == 200
    with ServerProcess(tmp_path, *flags, "--strict-readiness=false") as server:
        assert status(server, "/v2/health/ready") == 200
