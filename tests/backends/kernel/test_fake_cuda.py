"""The fake CUDA driver is as unkind as it says (fake_cuda/fake.h): each mistake is seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.gpu import EAGER, LAZY, FakeGpu, needs_fake_gpu

pytestmark = needs_fake_gpu

HEAD = """
import ctypes
from cuda.bindings import driver as d
def call(result):
    error, *values = result
    assert int(error) == 0, error
    return values[0] if values else None
call(d.cuInit(0))
gpu = call(d.cuDeviceGet(0))
context = call(d.cuDevicePrimaryCtxRetain(gpu))
call(d.cuCtxSetCurrent(context))
a, b = call(d.cuStreamCreate(1)), call(d.cuStreamCreate(1))
def memory(n=4):
    return call(d.cuMemAlloc(n))
def pinned(value=None, n=4):
    at = int(call(d.cuMemHostAlloc(n, 0)))
    if value is not None:
        ctypes.c_int.from_address(at).value = value
    return at
def read(at):
    return ctypes.c_int.from_address(at).value
"""


def run(gpu: FakeGpu, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + code], env=gpu.env, capture_output=True, text=True, check=False
    )


ACROSS = """
device, source, target = memory(), pinned(7), pinned(-1)
event = call(d.cuEventCreate(0))
call(d.cuMemcpyHtoDAsync(device, source, 4, a))
call(d.cuEventRecord(event, a))
if WAIT:
    call(d.cuStreamWaitEvent(b, event, 0))
call(d.cuMemcpyDtoHAsync(target, device, 4, b))
if SYNC:
    call(d.cuStreamSynchronize(b))
print(read(target) == 7)
"""


@pytest.mark.parametrize(
    "wait, sync, mode, right",
    [(1, 1, LAZY, True), (0, 1, LAZY, False), (1, 0, LAZY, False), (0, 0, EAGER, True), (1, 1, 2, True)],
)
def test_work_that_nobody_waited_for_has_not_happened(wait: int, sync: int, mode: int, right: bool) -> None:
    with FakeGpu(mode=mode) as gpu:
        done = run(gpu, ACROSS.replace("WAIT", str(wait)).replace("SYNC", str(sync)))
        assert (done.returncode, done.stdout) == (0, f"{right}\n"), done.stderr


def test_pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_at_once() -> None:
    code = """
device, source, target = memory(), SOURCE, pinned(-1)
call(d.cuMemcpyHtoDAsync(device, source, 4, a))
ctypes.c_int.from_address(source).value = 8
call(d.cuMemcpyDtoHAsync(target, device, 4, a))
call(d.cuStreamSynchronize(a))
print(read(target))
"""
    with FakeGpu() as gpu:
        assert run(gpu, code.replace("SOURCE", "pinned(7)")).stdout == "8\n"
        pageable = "ctypes.addressof(keep := ctypes.c_int(7))"
        assert run(gpu, code.replace("SOURCE", pageable)).stdout == "7\n"


def test_the_host_cannot_touch_device_memory() -> None:
    with FakeGpu() as gpu:
        assert run(gpu, "print(read(int(memory())))").returncode == -11


@pytest.mark.parametrize(
    "code",
    [
        "x = memory(); call(d.cuMemFree(x)); d.cuMemcpyHtoDAsync(x, pinned(1), 4, a)",
        "x, y = memory(), memory(); d.cuMemcpyHtoDAsync(x, int(y), 4, a)",
        "d.cuMemcpyHtoDAsync(memory(), pinned(1), 5, a)",
        "call(d.cuStreamDestroy(a)); d.cuStreamSynchronize(a)",
        "call(d.cuCtxSetCurrent(None)); d.cuMemAlloc(4)",
    ],
    ids=["after-free", "device-as-host", "too-long", "destroyed-stream", "no-context"],
)
def test_what_cuda_forbids_is_a_violation(code: str) -> None:
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.returncode == 0 and "fake CUDA: " in done.stderr
        assert gpu["violations"] == 1
        gpu["violations"] = 0


def test_a_context_stays_broken_until_it_is_reset() -> None:
    code = """
pool = d.CUmemPoolProps()
pool.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool = call(d.cuMemPoolCreate(pool))
x = call(d.cuMemAllocFromPoolAsync(4, pool, a))
call(d.cuMemFreeAsync(x, a))
call(d.cuMemcpyHtoDAsync(x, pinned(1), 4, b))
print(d.cuStreamSynchronize(a)[0].name, d.cuStreamSynchronize(b)[0].name, d.cuMemAlloc(4)[0].name)
call(d.cuDevicePrimaryCtxReset(gpu))
memory()
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        bad = "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert done.stdout == f"CUDA_SUCCESS {bad} {bad}\n", done.stderr
        assert gpu["resets"] == 1


def test_everything_taken_is_counted() -> None:
    with FakeGpu() as gpu:
        run(gpu, "memory(8); pinned(1); call(d.cuEventCreate(0))")
        assert gpu.live() == {
            "live_allocations": 1, "live_bytes": 8, "live_pinned": 1, "live_streams": 2, "live_events": 1,
            "live_contexts": 1,
        }  # fmt: skip
        for name in gpu.live():
            gpu[name] = 0
        run(gpu, "call(d.cuMemFree(memory())); call(d.cuDevicePrimaryCtxRelease(gpu))")
        assert gpu.live() == {}


def test_the_nth_allocation_fails() -> None:
    with FakeGpu(fail_allocation=3) as gpu:
        assert run(gpu, "print([d.cuMemAlloc(4)[0].value for _ in range(4)])").stdout == "[0, 0, 2, 0]\n"
