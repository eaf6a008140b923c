"""Gauges of the machine: CPU and memory from /proc, GPUs through NVIDIA's management library.

The library (libnvidia-ml) is loaded at run time where it exists. Without it only the gauges of GPU memory exist,
for the GPUs that models use: they are read from the driver, which does not tell utilization, power and energy.
Calls of the library may take milliseconds, so a worker thread takes a sample every --metrics-interval-ms, and the
metrics document shows the last one.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field

from neptrio import process_parts
from neptrio.errors import TritonError

log = logging.getLogger("neptrio.metrics")


@dataclass(frozen=True)
class GpuSample:
    """One GPU. A value is None when the device does not tell it."""

    uuid: str
    utilization: float | None = None  # 0..1
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None  # since the server started


@dataclass(frozen=True)
class HostSample:
    """The machine at one moment. A value is None when the system does not tell it."""

    cpu_utilization: float | None = None  # from 0 to 1, since the previous sample
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    gpus: tuple[GpuSample, ...] = field(default=())


def parse_cpu_times(stat: str) -> tuple[int, int]:
    """(busy, total) jiffies of all CPUs from /proc/stat."""
    fields = [int(text) for text in stat.split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """(total, used) bytes from /proc/meminfo; used is what is not available."""
    rows = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total = int(rows["MemTotal"].split()[0]) * 1024
    available = int(rows.get("MemAvailable", rows["MemFree"]).split()[0]) * 1024
    return total, total - available


class HostSampler:
    """Takes samples. One thread at a time."""

    def __init__(self, cpu: bool, gpu: bool) -> None:
        self._cpu = cpu
        self._times = (0, 0)
        self._gpus = Gpus() if gpu else None
        if cpu:
            try:
                with open("/proc/stat") as file:
                    self._times = parse_cpu_times(file.read())
            except (OSError, ValueError, IndexError):
                self._cpu = False

    def sample(self) -> HostSample:
        """The current values."""
        gpus = self._gpus.sample() or of_driver() if self._gpus is not None else ()
        if not self._cpu:
            return HostSample(gpus=gpus)
        with open("/proc/stat") as file:
            busy, total = parse_cpu_times(file.read())
        with open("/proc/meminfo") as file:
            memory = parse_memory(file.read())
        was_busy, was_total = self._times
        self._times = busy, total
        elapsed = total - was_total
        utilization = min(1.0, max(0.0, (busy - was_busy) / elapsed)) if elapsed > 0 else 0.0
        return HostSample(utilization, *memory, gpus)


def of_driver() -> tuple[GpuSample, ...]:
    """The memory of the GPUs that this process uses, as the driver counts it."""
    found = []
    for _, device in sorted(process_parts.gpus.items()):
        try:
            info = device.memory_info()
        except TritonError:
            continue  # its context broke during the call
        if info is not None:
            found.append(
                GpuSample(info.uuid, memory_total_bytes=info.total_bytes, memory_used_bytes=info.used_bytes)
            )
    return tuple(found)


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Gpus:
    """The machine's NVIDIA GPUs; empty without the library or a driver."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._devices: list[tuple[str, ctypes.c_void_p]] = []
        self._energy_at_start: dict[str, float] = {}
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:
            return
        if self._nvml.nvmlInit_v2() != 0:
            log.info("no GPU metrics: the NVIDIA management library did not start")
            return
        count = ctypes.c_uint()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                continue
            uuid = ctypes.create_string_buffer(96)
            self._nvml.nvmlDeviceGetUUID(handle, uuid, 96)
            name = uuid.value.decode()
            self._devices.append((name, handle))
            self._energy_at_start[name] = self._number("nvmlDeviceGetTotalEnergyConsumption", handle) or 0.0

    def _number(self, function: str, handle: ctypes.c_void_p) -> float | None:
        """A reading divided by 1000, None when the device does not have it."""
        wide = function.endswith("EnergyConsumption")
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        call = getattr(self._nvml, function, None)
        if call is None or call(handle, ctypes.byref(value)) != 0:
            return None
        return value.value / 1000

    def sample(self) -> tuple[GpuSample, ...]:
        """The current values of every GPU, in the driver's order."""
        samples = []
        for uuid, handle in self._devices:
            rates, memory = _Utilization(), _Memory()
            rated = self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
            sized = self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            energy = self._number("nvmlDeviceGetTotalEnergyConsumption", handle)
            samples.append(
                GpuSample(
                    uuid,
                    rates.gpu / 100 if rated else None,
                    memory.total if sized else None,
                    memory.used if sized else None,
                    self._number("nvmlDeviceGetPowerUsage", handle),
                    self._number("nvmlDeviceGetPowerManagementLimit", handle),
                    None if energy is None else energy - self._energy_at_start[uuid],
                )
            )
        return tuple(samples)
