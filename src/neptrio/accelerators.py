"""Which GPUs this machine has, learnt from the driver's files: nothing of CUDA is imported.

A machine without a driver has no such files, and neither does a container without devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One device, in the driver's order."""

    index: int
    name: str


@cache
def gpus(proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> tuple[Gpu, ...]:
    """The GPUs whose device files this process can see."""
    nodes = [n for n in dev.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", n.name)]
    if not nodes:
        return ()
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


def describe() -> str:
    """The start-up text."""
    return ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in gpus()) or "none (CPU only)"
