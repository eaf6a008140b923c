"""The machine's gauges from recorded /proc texts, and a machine without GPUs."""

from __future__ import annotations

from neptrio.observe.host import Gpus, HostSampler, parse_cpu_times, parse_memory


def test_cpu_times() -> None:
    assert parse_cpu_times("cpu  10 1 5 70 4 1 2 0 0 0\ncpu0 1 1 1 1\n") == (19, 93)


def test_memory() -> None:
    text = "MemTotal:       1000 kB\nMemFree:   100 kB\nMemAvailable:    400 kB\n"
    assert parse_memory(text) == (1000 * 1024, 600 * 1024)


def test_no_library_means_no_gpus() -> None:
    assert Gpus("libno-such-library.so.1").sample() == ()


def test_switches() -> None:
    sample = HostSampler(cpu=False, gpu=False).sample()
    assert sample.cpu_utilization is None and sample.gpus == ()
    sample = HostSampler(cpu=True, gpu=False).sample()
    assert sample.cpu_utilization is not None and 0 <= sample.cpu_utilization <= 1
