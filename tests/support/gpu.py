"""The fake CUDA driver (described in fake_cuda/fake.h): built here, and loaded by a server or a script.

Tests are marked `needs_fake_gpu` and use FakeGpu: it gives the environment for a process, the driver's counters, and
errors on demand.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fake_cuda"
KEPT = Path(__file__).parents[2] / "build" / "fake-cuda"
NUMBERS = [
    "live_allocations",
    "live_bytes",
    "live_pinned",
    "live_streams",
    "live_events",
    "live_modules",
    "live_graphs",
    "live_execs",
    "live_pools",
    "live_contexts",
    "live_ipc",
    "htod",
    "dtoh",
    "dtod",
    "peer",
    "htod_bytes",
    "dtoh_bytes",
    "dtod_bytes",
    "launches",
    "graph_launches",
    "memsets",
    "resets",
    "violations",
    "allocations",
    "trims",
    "cooperative",
    "clusters",
    "pinned_bytes",
    "queries",
    "elapsed",
]
SETTINGS = [
    "fail_allocation",
    "fail_launch",
    "fail_launch_with",
    "fault_kernel",
    "fault_kernel_with",
    "fail_load",
    "fail_pinned",
    "mode",
    "memory",
    "kernel_ns",
    "htod_ns",
    "dtoh_ns",
    "hang_kernel",
    "main_thread",
    "registers",
    "pin_ns",
    "pin_limit",
    "fail_times",
    "no_peers",
    "hold",
    "spoil",
    "journal",
]
INDEX = {name: i for i, name in enumerate(NUMBERS)} | {name: 40 + i for i, name in enumerate(SETTINGS)}
LAZY, EAGER = 0, 1  # values of `mode`; a greater one runs work in random order with that seed


@functools.cache
def missing() -> str:
    """Why the fake driver cannot be used here, "" when it can."""
    if importlib.util.find_spec("neptrio.backends.kernel.cuda_launch") is None:
        return "this build has no CUDA part (cuda-bindings and cuda.h were missing at build time)"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    if not shutil.which("cc") or not shutil.which("c++"):
        return "no C and C++ compiler"
    return ""


needs_fake_gpu = pytest.mark.skipif(bool(missing()), reason=f"no fake GPU: {missing()}")


@functools.cache
def _built() -> Path:
    """The folder with the fake libcuda.so.1, beside which is a cache of compiled kernels; kept for later runs."""
    sources = sorted(HERE.glob("*.[ch]"))
    flags = [
        "-std=c11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
    ]
    known = hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), " ".join(flags).encode()]))
    folder = KEPT / known.hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"made-by-{os.getpid()}"  # several processes of pytest may build it at once
        files = [str(path) for path in sources if path.suffix == ".c"]
        subprocess.run(["cc", *flags, "-o", str(made), *files, "-ldl", "-lpthread"], check=True)
        made.replace(library)
    return folder


class FakeGpu:
    """One process's GPUs: `with FakeGpu(devices=2) as gpu: ServerProcess(..., env=gpu.env)`."""

    def __init__(self, devices: int = 1, **settings: int) -> None:
        self.folder = _built()
        descriptor, self._path = tempfile.mkstemp(dir=self.folder, prefix="numbers-")
        os.ftruncate(descriptor, 64 * 8)
        self._memory = mmap.mmap(descriptor, 64 * 8)
        os.close(descriptor)
        here = [str(HERE / "site"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self.env = os.environ | {
            "LD_LIBRARY_PATH": f"{self.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "PYTHONPATH": ":".join(p for p in here if p),
            "FAKE_CUDA_NUMBERS": self._path,
            "FAKE_CUDA_DEVICES": str(devices),
            "NEPTRIO_KERNEL_CACHE": str(self.folder / "kernels"),
        }
        for name, value in settings.items():
            self[name] = value

    def __getitem__(self, name: str) -> int:
        value: int = struct.unpack_from("q", self._memory, INDEX[name] * 8)[0]
        return value

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, INDEX[name] * 8, value)

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        return {name: self[name] for name in NUMBERS}

    def live(self) -> dict[str, int]:
        """What was allocated from the driver and not freed, by kind: all must be 0 at the end."""
        return {name: self[name] for name in NUMBERS if name.startswith("live_") and self[name]}

    def journal(self) -> list[tuple[str, ...]]:
        """The calls so far, with `journal=1`: (call, stream, bytes or event, ...), see fake.h."""
        path = Path(f"{self._path}.journal")
        return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        violations = self["violations"]
        self._memory.close()
        os.unlink(self._path)
        told = Path(f"{self._path}.violations")
        text = told.read_text() if told.exists() else ""
        told.unlink(missing_ok=True)
        Path(f"{self._path}.journal").unlink(missing_ok=True)
        if kind is None:
            assert violations == 0, f"{violations} violations of CUDA's rules:\n{text}"
