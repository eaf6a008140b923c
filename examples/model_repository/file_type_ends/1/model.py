"""ENDS = the first and last bytes of CONTENT as numbers; KNOWN = the type where these are too few to ask.

1024 from the beginning after leading white space, 1024 from the end before trailing white space,
each byte one number, 256 where there is nothing (ends.json, which examples/prepare.py writes).
"""

import json
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils


def of_few_bytes(content):
    """The type of a content that is too short for the model."""
    if not content:
        return b"empty"
    try:
        content.decode()
    except UnicodeDecodeError:
        return b"unknown"
    return b"txt"


class TritonPythonModel:
    def initialize(self, args):
        self.settings = json.loads((Path(args["model_repository"]) / "ends.json").read_text())

    def ends(self, content):
        """(INT32[2048], known type or b"")."""
        settings = self.settings
        head = content[: settings["block"]].lstrip()[: settings["beginning"]]
        tail = content[-settings["block"] :].rstrip()[-settings["end"] :]
        row = np.full(settings["beginning"] + settings["end"], settings["padding"], dtype=np.int32)
        if len(head) < settings["least_bytes"]:
            return row, of_few_bytes(content[: settings["block"]])
        row[: len(head)] = np.frombuffer(head, np.uint8)
        if tail:
            row[-len(tail) :] = np.frombuffer(tail, np.uint8)
        return row, b""

    def execute(self, requests):
        responses = []
        for request in requests:
            contents = pb_utils.get_input_tensor_by_name(request, "CONTENT").as_numpy().reshape(-1)
            rows, known = zip(*(self.ends(content) for content in contents), strict=True)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("ENDS", np.stack(rows)),
                        pb_utils.Tensor("KNOWN", np.array(known, dtype=object).reshape(-1, 1)),
                    ]
                )
            )
        return responses
