"""A server with the models that docs/protocol/observed.md 1 to 5 was seen with, and texts of both protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.python.models import config as python_config
from tests.backends.python.models import python_model
from tests.sequences.models import sequence_config
from tests.support.http import Http1, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

LOST = "Request for unknown model: "
STOL = (
    "failed to get model version from specified version string '{}' (details: stol), version should be an "
    "integral value > 0"
)
TOO_LOW = "invalid model version specified '{}' , version should be an integral value > 0"


# answers as its one string says
TOLD = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, request.inputs()[0].as_numpy().flat[0].decode()) for request in requests]

    def answer(self, request, told):
        if told == "raise":
            raise RuntimeError("unhandled python exception")
        if told == "nothing":
            return pb_utils.InferenceResponse([])
        if told == "wrong":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((2, 1), np.float32))])
        if told == "error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("said: verbatim"))
        if told.isupper():
            code = getattr(pb_utils.TritonError, told)
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("said", code))
        seen = {"flags": [request.flags(), request.correlation_id()], "parameters": request.parameters()}[told]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(seen)], object))])
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "B" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "Z" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [ { model_name: "simple" model_version: -1
  input_map { key: "INPUT0" value: "A" } input_map { key: "INPUT1" value: "B" }
  output_map { key: "OUTPUT0" value: "Z" } output_map { key: "OUTPUT1" value: "Y" } } ] }
"""
RESHAPED = """
backend: "identity" max_batch_size: 8
input { name: "I" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "O" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
"""
OPTIONAL = """
backend: "identity" max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "B" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "C" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
ALL_VERSIONS = "version_policy { all { } }"


def load(client: Http1, name: str, **config: Any) -> Reply:
    body = json.dumps({"parameters": {"config": json.dumps(config)}} if config else {}).encode()
    return client.request("POST", f"/v2/repository/models/{name}/load", body)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("observed")
    for name in ("simple", "gone", "stats", "ready"):
        write_model(repository, name, identity_config())
    write_model(repository, "versions", identity_config(pairs=1, extra=ALL_VERSIONS), versions=(1, 2, 10))
    write_model(repository, "half", identity_config("TYPE_FP16", dims="-1", pairs=1))
    write_model(repository, "text", identity_config("TYPE_STRING", dims="-1", pairs=1))
    write_model(repository, "number", identity_config("TYPE_FP32", dims="-1", pairs=1))
    write_model(repository, "dynamic", identity_config(extra="dynamic_batching { }"))
    write_model(repository, "direct", sequence_config("direct { }", 4))
    write_model(repository, "oldest", sequence_config("oldest { max_candidate_sequences: 4 }", 4))
    write_model(repository, "optional", OPTIONAL)
    write_model(repository, "reshaped", RESHAPED)
    write_model(repository, "ensemble", ENSEMBLE)
    write_model(
        repository, "decoupled", identity_config(extra="model_transaction_policy { decoupled: true }")
    )
    python_model(repository, "told", TOLD, python_config("IN:TYPE_STRING:-1", "OUT:TYPE_STRING:-1"))
    with ServerProcess(
        repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        failures="unhandled python exception",
    ) as process:
        with Http1(process.http) as client:
            assert client.request("POST", "/v2/repository/models/gone/unload").status == 200
            row = {"data_type": "TYPE_INT32", "dims": [16]}
            kept = {"specific": {"versions": [2, 10]}}  # version 1 is known from now on, and not ready
            assert (
                load(
                    client,
                    "versions",
                    backend="identity",
                    max_batch_size=8,
                    version_policy=kept,
                    input=[{"name": "INPUT0", **row}],
                    output=[{"name": "OUTPUT0", **row}],
                ).status
                == 200
            )
        yield process
