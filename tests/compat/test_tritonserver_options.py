"""Options, start and stop of neptrio.compat.tritonserver."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest

import neptrio.compat.tritonserver as tritonserver
from neptrio.compat.tritonserver.options import REFUSED, WITHOUT_EFFECT
from neptrio.logs import LogFile
from tests.support.repository import identity_config, write_model

ROOT = Path(__file__).resolve().parents[2]


def infer(server: tritonserver.Server, model: str = "identity") -> list[Any]:
    [response] = server.model(model).infer(inputs={"INPUT0": numpy.ones((1, 4), numpy.int32)})
    out: list[Any] = numpy.from_dlpack(response.outputs["OUTPUT0"]).tolist()
    return out


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "identity", identity_config(dims="4", pairs=1))
    return tmp_path / "models"


@pytest.fixture
def broken(repository: Path) -> Path:
    write_model(repository, "broken", 'backend: "nonsense"')
    return repository


def test_a_server_stops_and_starts_again(repository: Path) -> None:
    options = tritonserver.Options(repository)
    server = tritonserver.Server(options)
    assert server.options is options
    for call in (server.ready, server.live, server.models, server.metrics, server.stop):
        with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
            call()
    with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
        server.model("identity")
    for _ in range(2):
        assert server.start() is server
        model = server.model("identity")
        assert infer(server) == [[1] * 4]
        server.stop()
        with pytest.raises(tritonserver.UnavailableError, match="stopped"):
            model.ready()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"server_id": 1}, TypeError, "server_id must be str, got int"),
        ({"model_repository": 1}, TypeError, "model_repository must be str"),
        ({"model_repository": None}, tritonserver.InvalidArgumentError, "model_repository is missing"),
        ({"model_repository": []}, tritonserver.InvalidArgumentError, "model_repository is missing"),
        ({"model_repository": "/no/such/folder"}, tritonserver.InternalError, "no such folder"),
        ({"exit_timeout": True}, TypeError, "exit_timeout must be int, got bool"),
        ({"exit_timeout": -1}, tritonserver.InvalidArgumentError, "exit_timeout must be >= 0"),
        ({"model_control_mode": "explicit"}, TypeError, "must be ModelControlMode"),
        ({"model_namespacing": True}, tritonserver.UnsupportedError, "model_namespacing is not supported"),
        ({"host_policies": {"a": {}}}, tritonserver.UnsupportedError, "numactl"),
        ({"cache_config": {"redis": {}}}, tritonserver.InvalidArgumentError, "there is no cache 'redis'"),
        ({"cache_config": {"a": {}, "b": {}}}, tritonserver.InvalidArgumentError, "one response cache"),
        ({"metrics_configuration": {"": {"tea": "1"}}}, tritonserver.InvalidArgumentError, "'tea'"),
        ({"backend_directory": "/no/such"}, tritonserver.InvalidArgumentError, "no folder"),
    ],
)
def test_wrong_options_are_refused_at_start(
    repository: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    server = tritonserver.Server(**{"model_repository": str(repository), **options})
    with pytest.raises(error, match=text):
        server.start()
    with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
        server.ready()


def test_a_model_that_cannot_be_loaded(broken: Path) -> None:
    with pytest.raises(tritonserver.InternalError, match="failed to load all models"):
        tritonserver.Server(model_repository=broken).start()
    server = tritonserver.Server(model_repository=broken, exit_on_error=False)
    with pytest.raises(tritonserver.UnavailableError, match="Timeout before ready"):
        server.start(wait_until_ready=True, polling_interval=0, timeout=0)
    assert "nonsense" in str(server.models()["broken", 1].reason)
    server.stop()


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="speed"):
        tritonserver.Server(speed=11)


def test_options_without_effect_warn(repository: Path) -> None:
    server = tritonserver.Server(model_repository=[str(repository)], buffer_manager_thread_count=2)
    with pytest.warns(UserWarning, match="buffer_manager_thread_count has no effect: instances copy"):
        server.start(wait_until_ready=True)
    server.stop()


def test_settings_reach_the_server(repository: Path, tmp_path: Path) -> None:
    server = tritonserver.Server(
        model_repository=repository,
        rate_limiter_mode=tritonserver.RateLimitMode.EXEC_COUNT,
        rate_limiter_resources=[tritonserver.RateLimiterResource("R", 2, 0)],
        cache_config={"local": {"size": 1 << 20}},
        metrics_configuration={"": {"summary_latencies": "true"}},
        backend_configuration={"python": {"shm-region-prefix-name": "x"}},
        model_load_retry_count=1,
        strict_model_config=True,
        exit_timeout=5,
        metrics=False,
    ).start()
    settings = server._running().engine.core.settings
    assert settings.rate_limit == "execution_count"
    assert settings.rate_limit_resource == (("R", 0, 2),)
    assert settings.cache_config == ("local,size=1048576",)
    assert settings.metrics_config == ("summary_latencies=true",)
    assert settings.backend_config == {"python": {"shm-region-prefix-name": "x"}}
    assert (settings.model_load_retry_count, settings.exit_timeout_secs) == (1, 5)
    assert settings.disable_auto_complete_config
    with pytest.raises(tritonserver.UnsupportedError, match="metrics=False"):
        server.metrics()
    with pytest.raises(tritonserver.UnavailableError, match="explicit model load"):
        server.load("identity")
    server.stop()


def test_polling_is_asked_for(repository: Path) -> None:
    server = tritonserver.Server(
        model_repository=repository, model_control_mode=tritonserver.ModelControlMode.POLL
    ).start()
    write_model(repository, "second", identity_config(dims="4", pairs=1))
    assert not server.model("second").ready()
    server.poll_model_repository()
    assert infer(server, "second") == [[1] * 4]
    server.stop()


def test_a_log_of_its_own(broken: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    server = tritonserver.Server(
        model_repository=broken,
        exit_on_error=False,
        log_file=str(file),
        log_error=True,
        log_format=tritonserver.LogFormat.ISO8601,
    ).start()
    assert not server.ready()
    server.stop()
    text = file.read_text()
    assert "'nonsense'" in text
    assert text.startswith("2")
    assert not [h for h in logging.getLogger("neptrio").handlers if isinstance(h, LogFile)]


def test_every_option_is_explained() -> None:
    page = (ROOT / "docs/compat-tritonserver.md").read_text()
    for one in fields(tritonserver.Options):
        [row] = [
            line
            for line in page.splitlines()
            if line.startswith("|") and f"`{one.name}`" in line.split("|")[1]
        ]
        assert ("refused" in row) == (one.name in REFUSED), row
        assert ("no effect" in row) == (one.name in WITHOUT_EFFECT), row


@pytest.mark.slow
def test_a_program_that_does_not_stop_its_server_ends(repository: Path) -> None:
    # a machine that stands still for a moment is not what this is about: the loop would warn of it
    program = f"""
import logging
import numpy
import neptrio.compat.tritonserver as tritonserver
logging.basicConfig(level=logging.ERROR)
server = tritonserver.Server(model_repository={str(repository)!r}).start(wait_until_ready=True)
for response in server.model("identity").infer(inputs={{"INPUT0": numpy.ones((1, 4), numpy.int32)}}):
    print(numpy.from_dlpack(response.outputs["OUTPUT0"]).sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_types_are_checked_before_anything_else() -> None:
    with pytest.raises(TypeError, match="server_id must be str, got int"):
        tritonserver.Server(server_id=1).start()  # without a repository
