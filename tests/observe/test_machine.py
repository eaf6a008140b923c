"""The machine's gauges from recorded /proc texts, and a machine without GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from neptrio.observe.machine import Gpus, HostSampler, parse_cpu_times, parse_memory


def test_cpu_times() -> None:
    assert parse_cpu_times("cpu  10 1 5 70 4 1 2 0 0 0\ncpu0 1 1 1 1\n") == (19, 93)


def test_memory() -> None:
    text = "MemTotal:       1000 kB\nMemFree:   100 kB\nMemAvailable:    400 kB\n"
    assert parse_memory(text) == (1000 * 1024, 600 * 1024)


def test_no_library_means_no_gpus() -> None:
    assert Gpus("libno-such-library.so.1").sample() == ()


FAKE = """
#include <string.h>
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
static int devices[2];
static unsigned long long energy = 7000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) { *h = &devices[i]; return 0; }
int nvmlDeviceGetUUID(void* h, char* s, unsigned n) { strncpy(s, h == devices ? "GPU-a" : "GPU-b", n); return 0; }
int nvmlDeviceGetUtilizationRates(void* h, Rates* r) { r->gpu = 25; return h == devices; }
int nvmlDeviceGetMemoryInfo(void* h, Memory* m) { m->total = 1ull << 40; m->used = 1ull << 33; return 0; }
int nvmlDeviceGetPowerUsage(void* h, unsigned* mw) { *mw = 250500; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void* h, unsigned long long* mj) { *mj = energy; energy += 500; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_management_library_is_asked(tmp_path: Path) -> None:
    """A stand-in with the library's functions; one device has no rates, neither has a power limit."""
    source, library = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text(FAKE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    first, second = Gpus(str(library)).sample()
    assert (first.uuid, first.utilization, first.memory_total_bytes) == ("GPU-a", None, 1 << 40)
    assert (second.uuid, second.utilization, second.memory_used_bytes) == ("GPU-b", 0.25, 1 << 33)
    assert (second.power_watts, second.power_limit_watts) == (250.5, None)
    assert (first.energy_joules, second.energy_joules) == (1.0, 1.0), "since the start"


def test_switches() -> None:
    sample = HostSampler(cpu=False, gpu=False).sample()
    assert sample.cpu_utilization is None and sample.gpus == ()
    sample = HostSampler(cpu=True, gpu=False).sample()
    assert sample.cpu_utilization is not None and 0 <= sample.cpu_utilization <= 1
