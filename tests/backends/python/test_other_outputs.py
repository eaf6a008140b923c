"""Answers that are not as the configuration says are passed on as a Triton server does, and the log says what differs."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess

# the id of a request says which outputs it is answered with
MODEL = """
import numpy as np
MADE = {
    "misnamed": [("OUTPT0", np.zeros((1, 2), np.float32))],
    "type": [("OUTPUT0", np.zeros((1, 2), np.float64))],
    "rank": [("OUTPUT0", np.zeros(2, np.float32))],
    "right": [("OUTPUT0", np.zeros((1, 2), np.float32))],
}
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(*row) for row in MADE[r.request_id()]]) for r in requests]
"""
INPUT = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


@pytest.mark.parametrize("way", ["process", "none"])
def test_the_log_says_how_an_answer_differs_from_the_configuration(tmp_path: Path, way: str) -> None:
    text = config("IN:TYPE_FP32:2", "OUTPUT0:TYPE_FP32:2", 4)
    for name in ("m", "asked", "good"):
        isolated(tmp_path, name, MODEL, text, way=way)

    def names(server: ServerProcess, model: str, kind: str, outputs: list[str] | None = None) -> list[str]:
        body = {"id": kind, "inputs": [INPUT]} | (
            {} if outputs is None else {"outputs": [{"name": name} for name in outputs]}
        )
        with urlopen(f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode()) as answer:
            return [f"{o['name']} {o['datatype']} {o['shape']}" for o in json.load(answer)["outputs"]]

    with ServerProcess(tmp_path) as server:
        for _ in range(2):
            assert names(server, "m", "misnamed") == []
            assert names(server, "m", "type") == ["OUTPUT0 FP64 [1, 2]"]
            assert names(server, "m", "rank") == ["OUTPUT0 FP32 [2]"]
        assert names(server, "asked", "misnamed", ["OUTPUT0"]) == []
        assert names(server, "good", "right") == names(server, "good", "right", ["OUTPUT0"])
        for said in (
            "model 'm' makes output(s) ['OUTPT0'] that its configuration does not have: they are not sent",
            "model 'm' answers without its output 'OUTPUT0': clients get an answer that lacks it: is 'OUTPT0' meant to be it?",
            "model 'm' makes output 'OUTPUT0' as FP64, its configuration says FP32: clients get FP64",
            "model 'm' makes output 'OUTPUT0' with 1 dimension(s), its configuration says 2",
            "model 'asked' answers without its output 'OUTPUT0'",
        ):
            server.until_logged(said)
            assert server.log().count(said) == 1, said
        assert "model 'good'" not in server.log()
