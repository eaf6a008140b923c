"""Which GPUs this process can use, learnt from the driver's files: nothing of CUDA is imported.

A machine without a driver has no such files, and neither does a container without devices. Where the files
are not enough (CUDA_VISIBLE_DEVICES chooses among the devices; WSL has no such files) the driver library is
loaded and asked, which takes some tenths of a second.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CONNECTIONS = (
    "32"  # hardware queues of a device: with the usual 8, streams of many instances wait for each other
)


@dataclass(frozen=True)
class Gpu:
    """One device, in the driver's order."""

    index: int
    name: str


@cache
def gpus(
    proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev"), library: str = "libcuda.so.1"
) -> tuple[Gpu, ...]:
    """The GPUs whose device files exist here, or those that the driver reports (see the module's text)."""
    nodes = [n for n in dev.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", n.name)]
    if not nodes or "CUDA_VISIBLE_DEVICES" in os.environ:
        return _of_driver(library)
    found: list[Gpu] = []
    for info in sorted(proc.glob("*/information")):
        try:
            text = info.read_text()
        except OSError:
            continue
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if minor and not (dev / f"nvidia{minor[1]}").exists():
            continue  # the device belongs to another container
        model = re.search(r"Model:\s*(.+)", text)
        found.append(Gpu(len(found), model[1].strip() if model else "NVIDIA GPU"))
    return tuple(found) or tuple(Gpu(i, "NVIDIA GPU") for i in range(len(nodes)))


def _of_driver(library: str) -> tuple[Gpu, ...]:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ()
    before_start()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(128)
        driver.cuDeviceGetName(name, 128, index)
        found.append(Gpu(index, name.value.decode(errors="replace") or "NVIDIA GPU"))
    return tuple(found)


def before_start() -> None:
    """Sets what the driver reads when it starts (cuInit), unless the environment says otherwise."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)


def describe() -> str:
    """The GPUs in one line, for the start-up text."""
    return ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in gpus()) or "none (CPU only)"
