"""Prints in Markdown what a machine has for GPU models: each part, and what is wrong with it.

    python tools/gpu_check.py

The status is 1 where something that the GPU path needs is missing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neptrio.backends.kernel import device, nvrtc, source

HEADERS = (
    "cuda_fp16.h",
    "cuda_fp8.h",
    "cooperative_groups.h",
    "mma.h",
    "crt/mma.h",
    "cuda/std/cstdint",
    "cuda/barrier",
)


SOURCE = """
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cooperative_groups.h>
#include <mma.h>
#include <cuda/std/cstdint>
#include <cuda/barrier>
extern "C" __global__ void run(int* x) { x[0] = 1; }
"""


def driver() -> str:
    """The GPUs, by name, and the CUDA that the driver knows. Raises LookupError with its reason where there is none."""
    if not device.count():
        raise LookupError(device.why_none())
    from cuda.bindings import driver as library

    known = int(device.call(library.cuDriverGetVersion(), "asking for its version"))
    names = [f"CUDA {known // 1000}.{known % 1000 // 10}"]
    for ordinal in range(device.count()):
        gpu = device.Device.get(ordinal)
        names.append(f"{ordinal}: {gpu.name} ({gpu.architecture})")
        gpu.release()
    return "; ".join(names)


def compiler() -> str:
    """NVRTC's version."""
    _, major, minor = nvrtc.library().nvrtcVersion()
    return f"NVRTC {major}.{minor}"


def headers() -> str:
    """The folders with CUDA's headers. Raises LookupError for those that are not found."""
    folders = nvrtc.include_folders()
    missing = [name for name in HEADERS if not any((Path(folder) / name).is_file() for folder in folders)]
    if missing:
        raise LookupError(f"{', '.join(missing)} not in {', '.join(folders) or 'any folder'}")
    text = (Path(folders[0]) / "cuda.h").read_text(errors="replace")
    version = re.search(r"#define CUDA_VERSION (\d+)", text)
    number = int(version[1]) if version else 0
    return f"CUDA {number // 1000}.{number % 1000 // 10}: {', '.join(folders)}"


def compiled() -> str:
    """A source with all of those headers as device code. Raises InvalidArgument with the compiler's text."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.cu").write_text(SOURCE)
        made = nvrtc.compile_source(source.read(Path(folder) / "model.cu"), (), "sm_90", "check", ["run"])
    return f"{len(made.code)} bytes for sm_90"


def bindings() -> str:
    """The version of cuda-bindings."""
    from cuda import bindings

    return f"cuda-bindings {bindings.__version__}"


def onnx() -> str:
    """ONNX Runtime's version and execution providers."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}: {', '.join(onnxruntime.get_available_providers())}"


PARTS: tuple[tuple[str, Callable[[], str], bool], ...] = (
    ("driver", driver, True),
    ("compiler of kernels", compiler, True),
    ("headers", headers, True),
    ("a source with them", compiled, True),
    ("driver's interface", bindings, True),
    ("ONNX Runtime", onnx, False),
)


def main() -> int:
    print("## What the machine has\n\n| part | found |\n|---|---|")
    bad = 0
    for name, look, needed in PARTS:
        said: Any
        try:
            said = look()
        except Exception as error:  # a part that is missing says so in its own way
            said = f"**missing**: {type(error).__name__}: {error}"
            bad |= needed
        print(f"| {name} | {str(said).replace(chr(10), ' ')} |", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
