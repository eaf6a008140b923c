"""Other libraries on a real GPU: tritonclient's CUDA regions, and torch and CuPy in Python models. The fake driver has too
little of CUDA for them. Skipped where there is no GPU, or no such library; see test_gpu.py."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from neptrio.backends.kernel import device
from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support.gpu_models import ADD, add, add_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device.count() == 0 and os.environ.get("NEPTRIO_REQUIRE_GPU") != "1",
        reason=f"no GPU: {device.why_none() or 'none'}",
    ),
]
GPU = " instance_group { kind: KIND_GPU gpus: [ 0 ] }"
ADDED = {
    "torch": "torch.from_dlpack(x.to_dlpack()) + 1",
    "cupy": "cupy.from_dlpack(x) + cupy.int32(1)",
}
MODEL = """
import {library}
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            assert not x.is_cpu()
            y = {added}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", y)]))
        return responses
"""
IO = tensors("input", ("X", "INT32", "-1")) + tensors("output", ("Y", "INT32", "-1"))


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    """Fails a test that was not skipped though there is no GPU."""
    assert device.count(), f"NEPTRIO_REQUIRE_GPU=1, and there is no GPU: {device.why_none()}"


def test_regions_made_by_tritonclient(tmp_path: Path) -> None:
    import tritonclient.http as httpclient
    import tritonclient.utils.cuda_shared_memory as regions

    write_model(tmp_path, "add", add_config(GPU), {"1/model.cu": ADD})
    values = np.array([[1, 2, 3, 2**30]], np.int32)
    made = {name: regions.create_shared_memory_region(name, values.nbytes, 0) for name in ("x", "y")}
    try:
        regions.set_shared_memory_region(made["x"], [values])
        with ServerProcess(tmp_path, "--allow-client-shm=true") as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for name, region in made.items():
                    handle = regions.get_raw_handle(region)
                    client.register_cuda_shared_memory(name, handle, 0, values.nbytes)
                tensor = httpclient.InferInput("X", list(values.shape), "INT32")
                tensor.set_shared_memory("x", values.nbytes)
                output = httpclient.InferRequestedOutput("Y")
                output.set_shared_memory("y", values.nbytes)
                client.infer("add", [tensor], outputs=[output])
                got = regions.get_contents_as_numpy(made["y"], np.int32, list(values.shape))
                assert got.tolist() == (values + 1).tolist()
                client.unregister_cuda_shared_memory()
    finally:
        for region in made.values():
            regions.destroy_shared_memory_region(region)


@pytest.mark.parametrize("library", ADDED)
def test_python_models_with_tensors_of_other_libraries(tmp_path: Path, library: str) -> None:
    """Between two kernel models: what one library has queued is done before the other reads it."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    write_model(tmp_path, "a", add_config(GPU), {"1/model.cu": ADD})
    config = kernel_config(8, IO, parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no"), GPU)
    code = MODEL.format(library=library, added=ADDED[library])
    write_model(tmp_path, "other", config.replace('"kernel"', '"python"'), {"1/model.py": code})
    steps = "".join(
        f' step {{ model_name: "{model}" model_version: -1 input_map {{ key: "X" value: "{source}" }}'
        f' output_map {{ key: "Y" value: "{target}" }} }}'
        for model, source, target in (("a", "X", "t"), ("other", "t", "u"), ("a", "u", "Y"))
    )
    write_model(
        tmp_path, "three", f'platform: "ensemble" max_batch_size: 8 {IO} ensemble_scheduling {{ {steps} }}'
    )
    with ServerProcess(tmp_path) as server:
        for i in range(20):
            assert add(server, "three", i, -i) == (200, [i + 3, 3 - i])
