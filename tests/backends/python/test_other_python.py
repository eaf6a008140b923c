# ruff: noqa: F401  (imported tests run against this module's server)
"""Models whose environment has another version of Python: the oldest that this machine has and that is supported."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python import test_bls as bls
from tests.backends.python import test_decoupled as decoupled
from tests.backends.python import test_execute as execute
from tests.backends.python.models import isolated
from tests.backends.python.test_bls import (
    test_a_model_that_calls_itself,
    test_async_executions_overlap,
    test_async_failure,
    test_call_another_model,
    test_calls_by_label_and_alias,
    test_failures_come_back_as_error_responses,
    test_load_and_unload_from_a_model,
    test_nested_calls,
)
from tests.backends.python.test_decoupled import (
    test_a_cancelled_stream_stops_its_sender,
    test_a_client_that_reads_nothing_costs_little,
    test_a_decoupled_model_must_return_none,
    test_a_sender_of_a_model_that_is_not_decoupled,
    test_an_error_in_between,
    test_collecting_from_a_decoupled_model,
    test_final_with_data_and_without,
    test_many_responses,
    test_requests_that_the_model_leaves_open_fail,
    test_sending_after_the_final_response_is_refused,
)
from tests.backends.python.test_execute import (
    test_a_model_may_reuse_its_output_buffer,
    test_a_model_may_write_to_its_inputs,
    test_a_model_that_misbehaves,
    test_error_codes_of_responses,
    test_layouts,
    test_sum_and_difference,
)
from tests.backends.python.test_isolated import write_models
from tests.support.repository import write_model
from tests.support.server import ServerProcess

OLDEST = (3, 8)
VERSION = """
import sys
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        found = np.array(sys.version_info[:2], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]) for _ in requests]
"""


def interpreters() -> list[tuple[tuple[int, int], str]]:
    """Other versions of Python on this machine, the oldest first."""
    found: dict[tuple[int, int], str] = {}
    places = [Path(p) for minor in range(8, 16) if (p := shutil.which(f"python3.{minor}"))]
    places += sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    for place in places:
        try:
            said = subprocess.run([place, "-V"], capture_output=True, text=True, timeout=30).stdout
        except OSError:
            continue
        version = re.match(r"Python 3\.(\d+)\.\d+$", said.strip())
        if version is not None:
            found.setdefault((3, int(version[1])), str(place))
    return sorted((v, p) for v, p in found.items() if v >= OLDEST and v != sys.version_info[:2])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[int, int], Path]:
    """A virtual environment with another Python and numpy."""
    reasons = ["no other Python here"]
    for version, python in interpreters():
        folder = tmp_path_factory.mktemp("environment") / "env"
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        try:
            for command in ([python, "-m", "venv", folder], [*pip, "--only-binary=:all:", "numpy"]):
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"no numpy for {python}: {getattr(error, 'stderr', '') or error}")
            continue
        return version, folder
    pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, environment: tuple[tuple[int, int], Path]
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_models(repository, str(environment[1]))
    isolated(repository, "version", VERSION, way=str(environment[1]))
    loads = [f"--load-model={d.name}" for d in repository.iterdir() if d.name != "spare"]
    with ServerProcess(
        repository, "--model-control-mode=explicit", f"--http-max-input-size={128 << 20}", *loads
    ) as process:
        yield process


def call(server: ServerProcess, model: str, array: np.ndarray) -> np.ndarray:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", list(array.shape), "BYTES" if array.dtype == object else "FP32")
        tensor.set_data_from_numpy(array)
        found: np.ndarray = client.infer(model, [tensor]).as_numpy("OUT")
        return found


def test_it_is_another_version(server: ServerProcess, environment: tuple[tuple[int, int], Path]) -> None:
    assert tuple(call(server, "version", np.ones(1, np.float32))) == environment[0]


def test_strings(server: ServerProcess) -> None:
    texts = np.array([b"", b"one", "zw\u00f6lf".encode(), b"x" * 100_000], dtype=object)
    assert call(server, "identity_string", texts).tolist() == texts.tolist()


@pytest.mark.slow
def test_messages_beyond_the_area_take_segments_of_their_own(server: ServerProcess) -> None:
    large = np.arange(20 << 20, dtype=np.float32)  # 80 MiB
    assert (call(server, "in_place", large) == 2 * large).all()


@pytest.mark.slow
def test_many_requests(server: ServerProcess) -> None:
    """More than the rings have entries."""
    for i in range(1500):
        found = call(server, "in_place", np.full(3, i, np.float32))
        assert found.tolist() == [2 * i] * 3
