"""A process that answers with a great many outputs which its model does not have keeps nobody but its own clients waiting."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess

OUTPUTS = 400
MODEL = """
import numpy as np
MANY = [pb_utils.Tensor(f"output_like_{i}", np.zeros(1, np.float32)) for i in range(20000)]
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(MANY) for r in requests]
"""


@pytest.mark.slow
def test_many_misnamed_outputs(tmp_path: Path) -> None:
    names = " ".join(f"output_{i}:TYPE_FP32:1" for i in range(OUTPUTS))
    isolated(tmp_path, "m", MODEL, config("IN:TYPE_FP32:1", names))
    with ServerProcess(tmp_path) as server:
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
        with pytest.raises(HTTPError) as caught:
            urlopen(f"http://{server.http}/v2/models/m/infer", json.dumps(body).encode(), timeout=15)
        with caught.value as error:
            assert error.code == 500
            assert "answers without its output 'output_0' and with" in json.load(error)["error"]
