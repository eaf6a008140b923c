"""The built-in backends `identity` and `sequence`, which behave as a Triton server's test backends where a configuration
asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.control import load, refused
from tests.support.repository import write_model
from tests.support.server import ServerProcess

OPTIONAL = """backend: "identity" max_batch_size: 4
input [ { name: "IN0" data_type: TYPE_INT32 dims: [ 2 ] }, { name: "IN1" data_type: TYPE_FP32 dims: [ 3 ] optional: true },
        { name: "IN2" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "OUT0" data_type: TYPE_INT32 dims: [ 2 ] }, { name: "OUT1" data_type: TYPE_FP32 dims: [ 3 ] },
         { name: "OUT2" data_type: TYPE_STRING dims: [ -1 ] } ]"""
SUMS = """backend: "sequence" max_batch_size: {batch}
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ {dims} ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ {out} ] }} ]
sequence_batching {{ max_sequence_idle_microseconds: 60000000 {more} }}"""
STATE = 'state [ { input_name: "S_IN" output_name: "S_OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]'
SLOW = """backend: "identity" input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "creation_delay_sec" value { string_value: "%s" } }"""
OWN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("O", np.array([41], np.int32))]) for _ in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "optional", OPTIONAL)
    write_model(repository, "all", SUMS.format(batch=2, dims="2, 3", out="1", more=""))
    write_model(repository, "all_unbatched", SUMS.format(batch=0, dims="4", out="1", more=""))
    write_model(repository, "all_state", SUMS.format(batch=2, dims="4", out="1", more=STATE))
    write_model(repository, "each", SUMS.format(batch=2, dims="4", out="4", more=""))
    write_model(repository, "each_of_any", SUMS.format(batch=0, dims="2, 2", out="-1, -1", more=""))
    write_model(repository, "slow", SLOW % "0.5")
    write_model(repository, "wrong", SLOW % "soon")
    flags = ("--model-control-mode=explicit", *(f"--load-model={name}" for name in MODELS))
    with ServerProcess(repository, *flags) as process:
        yield process


MODELS = ("optional", "all", "all_unbatched", "all_state", "each", "each_of_any")


@pytest.fixture(params=[httpclient, grpcclient], ids=["http", "grpc"])
def ask(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    module = request.param
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:

        def call(model: str, name: str, array: np.ndarray, **options: Any) -> Any:
            tensor = module.InferInput(name, list(array.shape), "INT32")
            tensor.set_data_from_numpy(array)
            return client.infer(model, [tensor], **options)

        yield call


def test_zeros_for_an_optional_input_that_is_left_out(ask: Any) -> None:
    result = ask("optional", "IN0", np.array([[1, 2], [3, 4], [5, 6]], np.int32))
    np.testing.assert_array_equal(result.as_numpy("OUT0"), [[1, 2], [3, 4], [5, 6]])
    zeros = result.as_numpy("OUT1")
    assert zeros.dtype == np.float32 and zeros.shape == (3, 3) and not zeros.any()
    assert result.as_numpy("OUT2").tolist() == [[b""]] * 3


@pytest.mark.parametrize(
    ("model", "shape"), [("all", (1, 2, 3)), ("all_unbatched", (4,)), ("all_state", (1, 4))]
)
def test_a_sum_of_all_elements(ask: Any, model: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    total = 0
    for number in range(3):
        flags = {"sequence_start": number == 0, "sequence_end": number == 2}
        found = ask(model, "IN", array + number, sequence_id=5, **flags).as_numpy("OUT")
        total += int((array + number).sum())
        assert found.shape == ((1, 1) if len(shape) > 1 else (1,)) and found.flat[0] == total


@pytest.mark.parametrize(("model", "shape"), [("each", (1, 4)), ("each_of_any", (2, 2))])
def test_a_sum_of_each_element(ask: Any, model: str, shape: tuple[int, ...]) -> None:
    array = np.arange(4, dtype=np.int32).reshape(shape)
    ask(model, "IN", array, sequence_id=5, sequence_start=True)
    found = ask(model, "IN", array, sequence_id=5, sequence_end=True)
    np.testing.assert_array_equal(found.as_numpy("OUT"), 2 * array)


def test_a_load_that_takes_its_time(server: ServerProcess) -> None:
    begun = time.monotonic()
    assert load(server, "slow").status == 200
    assert time.monotonic() - begun >= 0.5
    text = "parameter 'creation_delay_sec' of model 'wrong' must be a number of seconds, got 'soon'"
    assert text in refused(load(server, "wrong"), 400)


def test_a_backend_of_that_name_in_the_folder_of_backends_wins(tmp_path: Path) -> None:
    for name in ("identity", "sequence"):
        folder = tmp_path / "backends" / name
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(OWN)
        config = (SLOW % "0").replace('"identity"', f'"{name}"')
        write_model(tmp_path / "models", f"own_{name}", config)
    with ServerProcess(tmp_path / "models", f"--backend-directory={tmp_path / 'backends'}") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for name in ("identity", "sequence"):
                tensor = httpclient.InferInput("I", [1], "INT32")
                tensor.set_data_from_numpy(np.zeros(1, np.int32))
                assert client.infer(f"own_{name}", [tensor]).as_numpy("O").tolist() == [41]
            with pytest.raises(InferenceServerException):
                client.infer("own_other", [tensor])
