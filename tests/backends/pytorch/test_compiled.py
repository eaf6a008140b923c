"""A package of AOTInductor through the server. It takes a C++ compiler and a minute to make one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
]


class Scaled(torch.nn.Module):
    """A dictionary, and an argument with a name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, given, *, scale):  # type: ignore[no-untyped-def]
        return {"scaled": self.linear(given["x"]) * scale, "sum": given["x"].sum(1, keepdim=True)}


def config(names: dict[str, int], results: dict[str, int]) -> str:
    rows = [("input", names), ("output", results)]
    tensors = "".join(
        f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ {size} ] }} '
        for side, several in rows
        for name, size in several.items()
    )
    return f'platform: "torch_aoti" max_batch_size: 8 {tensors} instance_group {{ count: 2 kind: KIND_CPU }}'


WAYS = {"KWARGS[scale]": 1, "ARGS[0][x]": 4}, {"RESULT[sum]": 1, "RESULT[scaled]": 2}
NUMBERS = {"INPUT__1": 1, "INPUT__0": 4}, {"OUTPUT__1": 1, "OUTPUT__0": 2}


def test_a_compiled_package_serves(tmp_path: Path) -> None:
    folders = {
        name: write_model(tmp_path, name, config(*tensors))
        for name, tensors in (("ways", WAYS), ("numbers", NUMBERS))
    }
    module, rows = Scaled().eval(), {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(
        module,
        ({"x": torch.ones(2, 4)},),
        {"scale": torch.ones(2, 1)},
        dynamic_shapes={"given": {"x": rows}, "scale": rows},
    )
    torch._inductor.aoti_compile_and_package(program, package_path=str(folders["ways"] / "1/model.pt2"))
    shutil.copy(folders["ways"] / "1/model.pt2", folders["numbers"] / "1/model.pt2")
    x = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    scale = np.arange(3, dtype=np.float32).reshape(3, 1)
    with torch.no_grad():
        expected = module({"x": torch.from_numpy(x)}, scale=torch.from_numpy(scale))
    with ServerProcess(tmp_path, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for model, (names, results) in (("ways", WAYS), ("numbers", NUMBERS)):
                inputs = [httpclient.InferInput(name, [3, size], "FP32") for name, size in names.items()]
                for tensor, array in zip(inputs, (scale, x), strict=True):
                    tensor.set_data_from_numpy(array)
                answer = client.infer(model, inputs)
                for name, key in zip(results, ("sum", "scaled"), strict=True):
                    np.testing.assert_allclose(answer.as_numpy(name), expected[key].numpy(), 1e-5, 1e-6)
