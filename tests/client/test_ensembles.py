"""Ensembles and the response cache through the real clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "B" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "X" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1
    input_map { key: "INPUT0" value: "A" } input_map { key: "INPUT1" value: "B" }
    output_map { key: "OUTPUT0" value: "a" } output_map { key: "OUTPUT1" value: "b" } },
  { model_name: "second" model_version: -1
    input_map { key: "INPUT0" value: "b" } input_map { key: "INPUT1" value: "a" }
    output_map { key: "OUTPUT0" value: "X" } output_map { key: "OUTPUT1" value: "Y" } } ] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "an_ensemble", ENSEMBLE)
    write_model(repository, "first", identity_config())
    write_model(repository, "second", identity_config(extra="dynamic_batching { }"))
    write_model(repository, "cached", identity_config(extra="response_cache { enable: true }"))
    write_model(repository, "outer", ENSEMBLE.replace('"first"', '"cached"').replace('"second"', '"first"'))
    with ServerProcess(repository, "--cache-config=local,size=1048576") as process:
        yield process


def inputs(module: Any, names: tuple[str, str], width: int = 16) -> list[Any]:
    made = []
    for i, name in enumerate(names):
        tensor = module.InferInput(name, [2, width], "INT32")
        tensor.set_data_from_numpy(np.full((2, width), i + 1, dtype=np.int32))
        made.append(tensor)
    return made


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tensors_take_their_way(server: ServerProcess, kind: str) -> None:
    module: Any = httpclient if kind == "http" else grpcclient
    with module.InferenceServerClient(server.http if kind == "http" else server.grpc) as client:
        result = client.infer("an_ensemble", inputs(module, ("A", "B")), request_id="e1")
        np.testing.assert_array_equal(result.as_numpy("X"), np.full((2, 16), 2, dtype=np.int32))
        np.testing.assert_array_equal(result.as_numpy("Y"), np.full((2, 16), 1, dtype=np.int32))
        response = result.get_response()
        outputs = response["outputs"] if kind == "http" else response.outputs
        names = [o["name"] if kind == "http" else o.name for o in outputs]
        assert names == ["Y", "X"], "configured order"
        part = client.infer(
            "an_ensemble", inputs(module, ("A", "B")), outputs=[module.InferRequestedOutput("X")]
        )
        assert part.as_numpy("Y") is None and part.as_numpy("X") is not None


def test_metadata_and_statistics(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        before = client.get_inference_statistics("an_ensemble")["model_stats"][0]
        client.infer("an_ensemble", inputs(httpclient, ("A", "B")))
        stats = client.get_inference_statistics("an_ensemble")["model_stats"][0]
        assert stats["inference_count"] - before["inference_count"] == 2
        assert stats["execution_count"] - before["execution_count"] == 1
        assert (
            stats["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
        )
        assert client.get_model_metadata("an_ensemble")["platform"] == "ensemble"
        config = client.get_model_config("an_ensemble")
        assert config["instance_group"] == []


def test_errors_name_the_ensemble(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(
            InferenceServerException, match="unexpected shape for input 'A' for model 'an_ensemble'"
        ):
            client.infer("an_ensemble", inputs(httpclient, ("A", "B"), width=15))


def test_cache_hits_count_and_answer_the_same(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        results = [client.infer("cached", inputs(httpclient, ("INPUT0", "INPUT1"))) for _ in range(3)]
        for result in results:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), np.full((2, 16), 2, dtype=np.int32))
        stats = client.get_inference_statistics("cached")["model_stats"][0]["inference_stats"]
        assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (2, 1)
        assert (stats["success"]["count"], stats["compute_infer"]["count"]) == (3, 1)
        # a step that hits the cache goes on like one that was executed
        result = client.infer("outer", inputs(httpclient, ("A", "B")))
        np.testing.assert_array_equal(result.as_numpy("X"), np.full((2, 16), 2, dtype=np.int32))
        stats = client.get_inference_statistics("cached")["model_stats"][0]["inference_stats"]
        assert stats["cache_hit"]["count"] == 3


def test_an_ensemble_of_missing_models_does_not_load(tmp_path: Any) -> None:
    write_model(tmp_path, "broken", ENSEMBLE)
    with ServerProcess(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        assert (
            "ensemble broken contains models that are not available or ambiguous: first, second"
            in server.log()
        )
