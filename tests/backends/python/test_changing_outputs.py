"""A model that goes on writing to its output while the next step of an ensemble reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.onnx_models import model
from tests.support.repository import write_model
from tests.support.server import ServerProcess

COUNT = 200_000
# its indices are fine when they are checked; in between it makes them larger than any table
CHANGES = """
import ctypes, threading
import numpy as np

def change():
    for line in open("/proc/self/maps"):
        if "neptrio-rings" in line:
            begin, end = (int(n, 16) for n in line.split()[0].split("-"))
    outputs = np.frombuffer((ctypes.c_char * (4 << 20)).from_address(end - (64 << 20)), np.int64)
    while True:
        outputs[outputs == 7] = 1 << 40
        outputs[outputs == 1 << 40] = 7

class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=change, daemon=True).start()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", np.full(COUNT, 7, np.int64))]) for _ in requests]
"""
STEPS = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "FOUND" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step [
  { model_name: "changes" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "INDEX" value: "at" } },
  { model_name: "gather" model_version: -1 input_map { key: "INDEX" value: "at" } output_map { key: "FOUND" value: "FOUND" } }
] }
"""


@pytest.mark.slow
def test_indices_that_change_end_nobody(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.arange(10, dtype=np.float32), "TABLE")
    gather = model(
        [helper.make_node("Gather", ["TABLE", "INDEX"], ["FOUND"])],
        [helper.make_tensor_value_info("INDEX", TensorProto.INT64, [COUNT])],
        [helper.make_tensor_value_info("FOUND", TensorProto.FLOAT, [COUNT])],
        [table],
    )
    write_model(tmp_path, "gather", 'backend: "onnxruntime"', {"1/model.onnx": gather})
    python_model(
        tmp_path, "changes", f"COUNT = {COUNT}\n{CHANGES}", config(outputs=f"INDEX:TYPE_INT64:{COUNT}")
    )
    write_model(tmp_path, "both", STEPS, {"1/keep": b""})
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.zeros(1, np.float32))
        answered = 0
        for _ in range(60):
            try:
                found = client.infer("both", [given]).as_numpy("FOUND")
            except InferenceServerException as error:  # they had changed before they were copied
                assert "indices element out of data bounds" in str(error)
            else:
                assert (found == 7).all()
                answered += 1
        assert client.is_server_live()
        assert answered
