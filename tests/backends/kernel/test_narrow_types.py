"""Tensors of 16 and 8 bits in kernels: bfloat16, and floats of eight bits, which the protocol carries as bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from neptrio.backends.kernel import config, signature
from neptrio.config import model_config as model_config
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import NARROW, kernel_config, parameter, tensors
from tests.support.gpu import FakeGpu, needs_fake_gpu


def test_on_the_host() -> None:
    """Every number of eight bits, against ml_dtypes."""
    from benchmarks.gpu import Runner, compare

    runner = Runner(NARROW, "CPU")
    try:
        for n in (1, 3, 8):
            arrays = NARROW.make(np.random.default_rng(n), n)
            compare(NARROW, arrays, runner.infer(arrays)[0])
    finally:
        runner.close()


@pytest.mark.slow
@needs_fake_gpu
def test_on_the_fake_gpu() -> None:
    code = """
import numpy as np
from benchmarks.gpu import Runner, compare
from tests.backends.kernel.family import NARROW
runner = Runner(NARROW)
arrays = NARROW.make(np.random.default_rng(1), 4)
compare(NARROW, arrays, runner.infer(arrays)[0])
runner.close()
"""
    with FakeGpu(main_thread=1) as gpu:
        done = subprocess.run([sys.executable, "-c", code], env=gpu.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert gpu["launches"] > 0


def test_conversions_round_and_saturate(tmp_path: Path) -> None:
    """Halves between neighbours go to the even one; what is too large becomes the largest number."""
    from benchmarks.gpu import Runner, Written

    source = """
#include <cuda_fp8.h>
extern "C" __global__ void run(const float* x, unsigned char* a, unsigned char* b, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { a[i] = __nv_fp8_e4m3(x[i]).__x; b[i] = __nv_fp8_e5m2(x[i]).__x; }
}
"""
    written = kernel_config(
        8,
        tensors("input", ("X", "FP32", "-1")),
        tensors("output", ("A", "UINT8", "-1"), ("B", "UINT8", "-1")),
        parameter("kernels", "run<<<ceil_div(X.size, 64), 64>>>(X, A, B, X.size)"),
        parameter("shapes", "A = [batch, X.shape[1]]; B = [batch, X.shape[1]]"),
    )
    runner = Runner(Written("fp8", source, written, None, None), "CPU")  # type: ignore[arg-type]
    powers = np.exp2(np.linspace(-20, 20, 4001)).astype(np.float32)
    x = np.concatenate([powers, -powers, [0.0, -0.0, np.inf, -np.inf, 1.0625, 1.1875, 464.0, 480.0, 61440.0]])
    x = x.astype(np.float32)
    try:
        got = runner.infer({"X": x[None]})[0]
    finally:
        runner.close()
    for name, kind in (("A", ml_dtypes.float8_e4m3fn), ("B", ml_dtypes.float8_e5m2)):
        most = float(ml_dtypes.finfo(kind).max)
        expected = np.clip(x, -most, most).astype(kind)
        np.testing.assert_array_equal(got[name][0], expected.view(np.uint8))


@pytest.mark.parametrize(
    ("datatype", "declared", "message"),
    [
        ("UINT8", "const __nv_fp8_e4m3* x", ""),
        ("INT8", "const __nv_fp8x4_e5m2* x", ""),
        ("UINT8", "const __nv_fp8_storage_t* x", ""),
        (
            "FP16",
            "const __nv_fp8_e4m3* x",
            "expected '__nv_fp8_e4m3*' data, got input 'X' of type FP16 ('__half*')",
        ),
        ("BF16", "const __nv_bfloat16* x", ""),
        ("BF16", "const __half* x", "expected '__half*' data, got input 'X' of type BF16 ('__nv_bfloat16*')"),
    ],
)
def test_which_tensors_fit(datatype: str, declared: str, message: str) -> None:
    text = kernel_config(
        8,
        tensors("input", ("X", datatype, "4")),
        tensors("output", ("Y", "FP32", "4")),
        parameter("kernels", "run<<<1, 32>>>(X, Y)"),
    )
    spec = config.read(model_config.parse_text(text, "config.pbtxt"))
    found = signature.kernels(f"__global__ void run({declared}, float* y) {{}}", "model.cu")
    if not message:
        spec.check(found, "model.cu")
        return
    with pytest.raises(InvalidArgument) as info:
        spec.check(found, "model.cu")
    assert message in str(info.value)
