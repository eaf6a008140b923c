"""A model repository for programs of the in-process interface."""

from __future__ import annotations

from pathlib import Path

from tests.support.repository import identity_config, write_model

ECHO = '''
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives every input back under its output's name, and the parameters as JSON."""

    @staticmethod
    def auto_complete_config(config):
        for name, datatype in (("text", "TYPE_STRING"), ("half", "TYPE_FP16"), ("flag", "TYPE_BOOL")):
            dims = {"data_type": datatype, "dims": [-1, -1]}
            config.add_input({"name": name + "_input", "optional": True, **dims})
            config.add_output({"name": name + "_output", **dims})
        config.add_output({"name": "parameters", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.refuses = "refuses" in parameters

    def execute(self, requests):
        responses = []
        for request in requests:
            if self.refuses:
                error = pb_utils.TritonError("nothing today", pb_utils.TritonError.UNAVAILABLE)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            outputs = [
                pb_utils.Tensor(tensor.name().replace("input", "output"), tensor.as_numpy())
                for tensor in request.inputs()
            ]
            text = json.dumps({"request": request.request_id(), **json.loads(request.parameters())})
            outputs.append(pb_utils.Tensor("parameters", np.array([text], dtype=object)))
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
'''
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0])):
                if request.is_cancelled():
                    break
                block = np.full(1 << 18, i, np.int32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("block", block)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "block" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
SEQUENCES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            known = request.correlation_id()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0]
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            self.sums[known] = x if start else self.sums[known] + x
            total = pb_utils.Tensor("total", self.sums[known])
            responses.append(pb_utils.InferenceResponse([total], parameters={"of": str(known)}))
        return responses
"""
SEQUENCES_CONFIG = """
backend: "python"
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]
}
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "total" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""


def write_models(folder: Path) -> Path:
    """echo, count, sequences, identity, bfloat."""
    write_model(folder, "echo", 'backend: "python"', {"1/model.py": ECHO})
    write_model(folder, "count", COUNT_CONFIG, {"1/model.py": COUNT})
    write_model(folder, "sequences", SEQUENCES_CONFIG, {"1/model.py": SEQUENCES})
    write_model(folder, "identity", identity_config("TYPE_FP32", "-1"))
    write_model(folder, "bfloat", identity_config("TYPE_BF16", "-1", pairs=1))
    return folder
