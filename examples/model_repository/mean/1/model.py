"""MEAN of VALUES. This model has no config.pbtxt: auto_complete_config says what it takes."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_input({"name": "VALUES", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "MEAN", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "VALUES").as_numpy()
            mean = values.mean(axis=1, keepdims=True, dtype=np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("MEAN", mean)]))
        return responses

    def finalize(self):
        pb_utils.Logger.log_info(f"{self.name} is done")
