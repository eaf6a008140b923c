"""Python models whose load the test holds up, makes fail, and counts."""

from __future__ import annotations

from pathlib import Path

from tests.support.latch import Latch
from tests.support.repository import write_model

MODEL = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"])
        with open(os.path.join(folder, "loads"), "a") as loads:
            loads.write("x")
        if os.path.exists(os.path.join(folder, "latch")):
            with open(os.path.join(folder, "latch")) as held:
                held.read()
        if os.path.exists(os.path.join(folder, "broken")):
            raise ValueError("the weights are broken")

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
CONFIG = """backend: "python" max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
parameters { key: "isolation" value: { string_value: "none" } }
"""


def slow_model(repository: Path, name: str, extra: str = "") -> Path:
    """A model that answers with its input; its folder."""
    return write_model(repository, name, CONFIG + extra, {"1/model.py": MODEL})


def latch(folder: Path) -> Latch:
    """Holds up the model's loads until it is opened."""
    return Latch(folder / "latch")


def loads(folder: Path) -> int:
    """How many loads of the model have come to initialize()."""
    path = folder / "loads"
    return len(path.read_text()) if path.exists() else 0


def parameter(key: str, value: str) -> str:
    """A parameter of a configuration."""
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
