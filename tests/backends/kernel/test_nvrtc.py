"""Compiling for GPUs, which needs no GPU. Skipped where NVRTC is not installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.backends.kernel import device, nvrtc, source
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import FAMILY, HERE


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", str(tmp_path / "cache"))
    try:
        nvrtc.library()
    except InvalidArgument as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted({case.source for case in FAMILY}))
def test_the_family_compiles(name: str) -> None:
    if name == "dtypes.cu" and not nvrtc.include_folders():
        pytest.skip("cuda_fp16.h is not installed")
    made = nvrtc.compile_source(source.read(HERE / name), (), "sm_90", name)
    assert made.code[:4] == b"\x7fELF"
    assert all(lowered == kernel or lowered.startswith("_Z") for kernel, lowered in made.names.items())


def test_the_second_time_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    read = source.read(HERE / "matmul.cu")
    first = nvrtc.compile_source(read, (), "sm_90", "m")
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
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
