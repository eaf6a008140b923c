"""Configurations as a real server serves them: files, versions, optional inputs, endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

OPTIONAL = """
backend: "identity"
input [
  { name: "A" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "B" data_type: TYPE_FP32 dims: [ 2, -1 ] optional: true }
]
output [
  { name: "OUT_A" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "OUT_B" data_type: TYPE_FP32 dims: [ 2, -1 ] }
]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("configured")
    for name, policy in {
        "latest": "",
        "two": "version_policy { latest { num_versions: 2 } }",
        "every": "version_policy { all { } }",
        "some": "version_policy { specific { versions: [ 1, 10 ] } }",
    }.items():
        write_model(repository, name, identity_config(extra=policy), versions=(1, 2, 10))
    (repository / "latest" / "011").mkdir()  # no version: a leading zero
    (repository / "latest" / "notes").mkdir()
    write_model(
        repository, "named", identity_config(), {"configs/big.pbtxt": identity_config(max_batch_size=64)}
    )
    folder = write_model(repository, "json", "")
    (folder / "config.pbtxt").unlink()
    (folder / "config.json").write_text(
        '{"backend": "identity", "maxBatchSize": 2, "input": [{"name": "X", "data_type": "TYPE_INT8", "dims": [3]}],'
        ' "output": [{"name": "Y", "dataType": "TYPE_INT8", "dims": ["3"]}], "dynamic_batching": {},'
        ' "parameters": {"execute_delay_ms": {"string_value": "0"}}}'
    )
    write_model(repository, "optional", OPTIONAL)
    with ServerProcess(repository, "--model-config-name=big") as process:
        yield process


def test_version_policies(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        versions = {
            name: client.get_model_metadata(name)["versions"] for name in ("latest", "two", "every", "some")
        }
        assert versions == {
            "latest": ["10"],
            "two": ["2", "10"],
            "every": ["1", "2", "10"],
            "some": ["1", "10"],
        }
        assert client.get_model_config("every")["version_policy"] == {"all": {}}
        assert client.get_model_config("some")["version_policy"] == {"specific": {"versions": [1, 10]}}


def test_named_configuration(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_model_config("named")["max_batch_size"] == 64
        assert client.get_model_config("latest")["max_batch_size"] == 8


def test_json_configuration_on_both_protocols(server: ServerProcess) -> None:
    with (
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        plain = http.get_model_config("json")
        assert plain["dynamic_batching"] == {
            "preferred_batch_size": [2],
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
            "priority_levels": 0,
            "default_priority_level": 0,
            "priority_queue_policy": {},
        }
        assert plain["parameters"] == {"execute_delay_ms": {"string_value": "0"}}
        message = grpc.get_model_config("json").config
        assert message.name == plain["name"] == "json"
        assert list(message.input[0].dims) == plain["input"][0]["dims"] == [3]
        assert message.instance_group[0].name == plain["instance_group"][0]["name"] == "json"
        assert message.optimization.input_pinned_memory.enable


def test_optional_inputs(server: ServerProcess) -> None:
    a, b = np.arange(3, dtype=np.float32), np.ones((2, 1), np.float32)
    with httpclient.InferenceServerClient(server.http) as client:

        def tensor(name: str, array: np.ndarray) -> httpclient.InferInput:
            made = httpclient.InferInput(name, list(array.shape), "FP32")
            made.set_data_from_numpy(array)
            return made

        result = client.infer("optional", [tensor("A", a)])
        np.testing.assert_array_equal(result.as_numpy("OUT_A"), a)
        np.testing.assert_array_equal(result.as_numpy("OUT_B"), np.zeros((2, 1), np.float32))
        result = client.infer("optional", [tensor("B", b), tensor("A", a)])
        np.testing.assert_array_equal(result.as_numpy("OUT_B"), b)
        with pytest.raises(
            InferenceServerException, match="expected number of inputs between 1 and 2 but got 0"
        ):
            client.infer("optional", [])
        with pytest.raises(InferenceServerException, match=r"Expected \[2,-1\], got \[1,2\]"):
            client.infer("optional", [tensor("A", a), tensor("B", b.T)])
