"""Folders of versions with high numbers: those that a request can name are versions, as on a Triton server (64 bits, signed)."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess

MODEL = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for r in requests]
"""
MOMENT = 1767225600000000000  # nanoseconds, as some name versions
HIGHEST = (1 << 63) - 1
LABELS = ' parameters {{ key: "version_labels" value: {{ string_value: "now={}" }} }}'


@pytest.mark.parametrize("way", ["process", "none"])
def test_a_version_is_found_by_its_number(tmp_path: Path, way: str) -> None:
    for name, number in (("moment", MOMENT), ("highest", HIGHEST)):
        text = config("IN:TYPE_FP32:1", "OUT:TYPE_FP32:1") + LABELS.format(number)
        folder = isolated(tmp_path, name, MODEL, text, way=way)
        (folder / "1").rename(folder / str(number))
        (folder / str(HIGHEST + 1)).mkdir()  # no request can name it
    with ServerProcess(tmp_path) as server:
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
        for name, number in (("moment", MOMENT), ("highest", HIGHEST)):
            for version in ("", f"/versions/{number}", "/versions/now"):
                path = f"/v2/models/{name}{version}/infer"
                with urlopen(f"http://{server.http}{path}", json.dumps(body).encode()) as answer:
                    assert json.load(answer)["model_version"] == str(number)
