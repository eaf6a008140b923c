"""LABEL, DESCRIPTION and SCORE of the best of SCORES, or of KNOWN where the type is known without them.

A score below its type's threshold is shown as plain text or as unknown (file_types.json, which
examples/prepare.py writes).
"""

import json
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.about = json.loads((Path(args["model_repository"]) / "file_types.json").read_text())

    def name(self, scores):
        """(type, score)."""
        about = self.about
        best = int(scores.argmax())
        label, score = about["labels"][best], float(scores[best])
        name = about["shown_as"].get(label, label)
        if score < about["thresholds"].get(label, about["threshold"]):
            name = "txt" if about["types"][name]["is_text"] else "unknown"
        return name, score

    def execute(self, requests):
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()
            known = pb_utils.get_input_tensor_by_name(request, "KNOWN").as_numpy().reshape(-1)
            named = [
                (type.decode(), 1.0) if type else self.name(row)
                for row, type in zip(scores, known, strict=True)
            ]
            words = [self.about["types"].get(name, {}).get("description", name) for name, _ in named]

            def column(values, dtype):
                return np.array(values, dtype=dtype).reshape(-1, 1)

            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("LABEL", column([name.encode() for name, _ in named], object)),
                        pb_utils.Tensor("DESCRIPTION", column([word.encode() for word in words], object)),
                        pb_utils.Tensor("SCORE", column([score for _, score in named], np.float32)),
                    ]
                )
            )
        return responses
