"""Compiling for GPUs, which needs no GPU. Skipped where NVRTC is not installed, unless NEPTRIO_REQUIRE_GPU=1."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.backends.kernel import device, nvrtc, source
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import FAMILY, HERE

pytestmark = pytest.mark.nvrtc


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", str(tmp_path / "cache"))
    try:
        nvrtc.library()
    except InvalidArgument as error:
        if os.environ.get("NEPTRIO_REQUIRE_GPU") == "1":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("capability, name", [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")])
def test_the_architecture_is_the_devices_own(capability: tuple[int, int], name: str, tmp_path: Path) -> None:
    assert device.architecture(capability) == name
    (tmp_path / "model.cu").write_text("__global__ void run(int* x) { x[0] = 1; }")
    assert nvrtc.compile_source(source.read(tmp_path / "model.cu"), (), name, "m", ["run"]).code


@pytest.mark.parametrize("name", sorted({case.source for case in FAMILY}))
def test_the_family_compiles(name: str) -> None:
    if name == "dtypes.cu" and not nvrtc.include_folders():
        pytest.skip("cuda_fp16.h is not installed")
    made = nvrtc.compile_source(source.read(HERE / name), (), "sm_90", name)
    assert made.code[:4] == b"\x7fELF"
    assert all(lowered == kernel or lowered.startswith("_Z") for kernel, lowered in made.names.items())


SOURCES = {
    "cooperative groups": """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
__global__ void run(const float* x, float* y)
{
    auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    float sum = cg::reduce(warp, x[threadIdx.x], cg::plus<float>());
    cg::this_grid().sync();
    if (warp.thread_rank() == 0) y[blockIdx.x] = sum;
}
""",
    "clusters": """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
__global__ void run(const float* x, float* y)
{
    __shared__ float own;
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) own = x[blockIdx.x];
    cluster.sync();
    if (threadIdx.x == 0) y[blockIdx.x] = *cluster.map_shared_rank(&own, 0);
    cluster.sync();
}
""",
    "tensor cores": """
#include <mma.h>
using namespace nvcuda;
__global__ void run(const __half* a, const __half* b, float* c)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
""",
    "barriers of the C++ library": """
#include <cuda/barrier>
#include <cuda/std/array>
__global__ void run(const float* x, float* y)
{
    __shared__ cuda::barrier<cuda::thread_scope_block> arrived;
    if (threadIdx.x == 0) init(&arrived, blockDim.x);
    __syncthreads();
    cuda::std::array<float, 2> pair = {x[threadIdx.x], 1.0f};
    arrived.arrive_and_wait();
    y[threadIdx.x] = pair[0] + pair[1];
}
""",
    "bfloat16 and eight bits": """
#include <cuda_bf16.h>
#include <cuda_fp8.h>
__global__ void run(const __nv_fp8_e4m3* x, const __nv_bfloat16* w, __nv_fp8_e5m2* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __nv_fp8_e5m2(float(x[i]) * __bfloat162float(w[i]));
}
""",
    "matrix products of one generation": """
__global__ void run(int* x)
{
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    x[0] = 1;
}
""",
    "kernels that nobody launches": """
namespace other { __global__ void hidden(int* x) { x[0] = 1; } }
__global__ void twice(int* x) { }
__global__ void twice(float* x) { }
#if 0
__global__ void absent(int* x) { }
#endif
__global__ void run(int* x) { x[0] = 2; }
""",
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_people_have_compile(tmp_path: Path, name: str) -> None:
    """Given as they are, with the headers of the extra `cuda` and no options."""
    (tmp_path / "model.cu").write_text(SOURCES[name])
    found = [
        header
        for header in ("cuda_fp16.h", "crt/mma.h", "cuda/std/cstdint")
        if any((Path(folder) / header).is_file() for folder in nvrtc.include_folders())
    ]
    if len(found) < 3:
        pytest.skip(f"of CUDA's headers there are only those with {', '.join(found) or 'nothing'}")
    architecture = device.architecture((9, 0))
    made = nvrtc.compile_source(source.read(tmp_path / "model.cu"), (), architecture, "m", ["run"])
    assert made.code[:4] == b"\x7fELF" and "run" in made.names["run"]


def test_the_second_time_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    read = source.read(HERE / "matmul.cu")
    first = nvrtc.compile_source(read, (), "sm_90", "m")
    monkeypatch.setattr(nvrtc, "compile_text", lambda *_: pytest.fail("compiled again"))
    assert nvrtc.compile_source(read, (), "sm_90", "m") == first


def test_an_error_has_the_sources_line(tmp_path: Path) -> None:
    (tmp_path / "model.cu").write_text("\n__global__ void f(float* x) {\n  x[0] = nothing;\n}\n")
    with pytest.raises(
        InvalidArgument, match=r"does not compile for the GPU:\nmodel\.cu\(3\): error: .*nothing"
    ):
        nvrtc.compile_source(source.read(tmp_path / "model.cu"), (), "sm_90", "m")


LIMITS = """
#include <climits>
#define INT_MAX 0x7fffffff
#define FLT_MAX 3.40282346638528859811704183484516925e+38f
#define INFINITY (1.0f / 0.0f)
extern "C" __global__ void f(float* x) { int unused; x[0] = INT_MAX + FLT_MAX + INFINITY; }
"""


def test_limits_that_a_header_defines_in_its_own_words_are_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda/std/climits, cfloat and cmath do, after the headers that are always there."""
    (tmp_path / "model.cu").write_text(LIMITS)
    module, said = nvrtc.library(), []

    def destroy(program: Any) -> Any:
        _, size = module.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        module.nvrtcGetProgramLog(program, log)
        said.append(log.decode())
        return module.nvrtcDestroyProgram(program)

    spy = SimpleNamespace(**{name: getattr(module, name) for name in dir(module)})
    spy.nvrtcDestroyProgram = destroy
    monkeypatch.setattr(nvrtc, "library", lambda: spy)
    nvrtc.compile_source(source.read(tmp_path / "model.cu"), (), "sm_90", "m")
    assert "unused" in said[0] and "redefinition" not in said[0]


def test_device_count_says_why_there_is_none() -> None:
    assert device.count() > 0 or device.why_none()
