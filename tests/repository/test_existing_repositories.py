"""Repositories and load calls as they exist for Triton servers: what those take is taken here, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import HEAD
from tests.support.repository import write_model
from tests.support.server import ServerProcess

TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] %s } '
ADDS = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + {})]) for r in requests]
"""
)
PLATFORMS = {
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    backends: Path = tmp_path_factory.mktemp("backends")
    for number, backend in enumerate(("mine", *dict.fromkeys(PLATFORMS.values()))):
        (backends / backend).mkdir()
        (backends / backend / "model.py").write_text(ADDS.format(number))
    label = 'label_filename: "labels.txt"'
    labels = b"  one, with blanks \r\ntwo\xe2\x80\xa8still two\n"
    write_model(repository, "labelled", TENSORS % label + 'backend: "identity"', {"labels.txt": labels})
    levels = "dynamic_batching { priority_levels: 5000 default_priority_level: 2500 }"
    write_model(repository, "levels", TENSORS % "" + f'backend: "identity" max_batch_size: 4 {levels}')
    for name in ("adds.mine", "same.identity"):
        write_model(repository, name, TENSORS % "")
    for platform in PLATFORMS:
        write_model(repository, platform, TENSORS % "" + f'platform: "{platform}"')
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-file-override=true")
    with ServerProcess(repository, *flags, f"--backend-directory={backends}") as process:
        yield process


def infer(server: ServerProcess, model: str, shape: tuple[int, ...] = (2,), **more: Any) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", list(shape), "FP32")
        tensor.set_data_from_numpy(np.arange(2, dtype=np.float32).reshape(shape))
        return client.infer(model, [tensor], **more).as_numpy("OUT")


def test_labels_keep_their_blanks(server: ServerProcess) -> None:
    wanted = [httpclient.InferRequestedOutput("OUT", class_count=2)]
    found = infer(server, "labelled", outputs=wanted).tolist()
    assert found == [b"1.000000:1:two\xe2\x80\xa8still two", b"0.000000:0:  one, with blanks "]


@pytest.mark.parametrize("priority", [0, 1, 4999, 5000])
def test_more_than_a_thousand_priority_levels(server: ServerProcess, priority: int) -> None:
    assert infer(server, "levels", (1, 2), priority=priority).tolist() == [[0, 1]]


def test_a_folder_says_its_backend(server: ServerProcess) -> None:
    assert infer(server, "same.identity").tolist() == [0, 1]
    assert infer(server, "adds.mine").tolist() == [0, 1]
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_model_config("adds.mine")["backend"] == "mine"


@pytest.mark.parametrize(("platform", "backend"), PLATFORMS.items())
def test_a_platform_says_its_backend(server: ServerProcess, platform: str, backend: str) -> None:
    number = list(dict.fromkeys(PLATFORMS.values())).index(backend) + 1
    assert infer(server, platform).tolist() == [number, number + 1]
    with httpclient.InferenceServerClient(server.http) as client:
        found = client.get_model_config(platform)
    assert (found["backend"], found["platform"]) == (backend, platform)
    assert found["default_model_filename"] == ""


@pytest.mark.parametrize("path", ["/1/model.py", "./1/model.py", "1//model.py", "//.//1/././model.py"])
def test_paths_of_a_load_call_that_are_the_same_file(server: ServerProcess, path: str) -> None:
    row = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {"backend": "python", "input": [{"name": "IN", **row}], "output": [{"name": "OUT", **row}]}
    with httpclient.InferenceServerClient(server.http) as client:
        files = {f"file:{path}": ADDS.format(7).encode()}
        client.load_model("new", config=json.dumps(config), files=files)
        assert infer(server, "new").tolist() == [7, 8]
        with pytest.raises(InferenceServerException, match="are the same file: expected each file once"):
            client.load_model("new", config=json.dumps(config), files={**files, "file:1/model.py": b""})
        for wrong in ("/", "1/", ".", "1/.", "/../1/model.py", "1/..//model.py"):
            with pytest.raises(InferenceServerException, match=r"expected file:<version>|must stay within"):
                client.load_model("new", config=json.dumps(config), files={f"file:{wrong}": b""})
        client.unload_model("new")
