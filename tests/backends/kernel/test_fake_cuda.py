"""The fake CUDA driver is as unkind as it says (fake_cuda/fake.h): each mistake is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    gpu["main_thread"] = 1  # of these scripts
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


@pytest.mark.slow
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
        "x = ctypes.create_string_buffer(16384); at = -(-ctypes.addressof(x) // 4096) * 4096;"
        "call(d.cuMemHostRegister(at, 8192, 0)); d.cuMemHostRegister(at + 4096, 4096, 0)",
    ],
    ids=["after-free", "device-as-host", "too-long", "destroyed-stream", "no-context", "registered-twice"],
)
def test_what_cuda_forbids_is_a_violation(code: str) -> None:
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.returncode == 0 and "fake CUDA: " in done.stderr
        assert gpu["violations"] == 1
        gpu["violations"] = 0


def test_a_context_stays_broken_until_the_process_ends() -> None:
    code = """
pool = d.CUmemPoolProps()
pool.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool = call(d.cuMemPoolCreate(pool))
x = call(d.cuMemAllocFromPoolAsync(4, pool, a))
call(d.cuMemFreeAsync(x, a))
call(d.cuMemcpyHtoDAsync(x, pinned(1), 4, b))
print(d.cuStreamSynchronize(a)[0].name, d.cuStreamSynchronize(b)[0].name, d.cuMemAlloc(4)[0].name)
print(d.cuDevicePrimaryCtxReset(gpu)[0].name, d.cuMemAlloc(4)[0].name)
d.cuDevicePrimaryCtxRelease(gpu)
print(d.cuDevicePrimaryCtxRetain(gpu)[0].name)
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        bad = "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert done.stdout == f"CUDA_SUCCESS {bad} {bad}\n{bad} {bad}\n{bad}\n", done.stderr
        assert gpu["resets"] == 1 and "other libraries use it too" in done.stderr
        assert gpu["violations"] == 1
        gpu["violations"] = 0


HUNG = """
import os, threading
event, other = call(d.cuEventCreate(0)), call(d.cuEventCreate(0))
from tests.support.fake_cuda.site.fake_nvrtc import code_for
from pathlib import Path
module = call(d.cuModuleLoadData(code_for(Path(PATH))))
kernel = call(d.cuModuleGetFunction(module, b"spin"))
call(d.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, a, 0, 0))
call(d.cuEventRecord(event, a))
call(d.cuEventRecord(other, b))
print({d.cuEventQuery(event)[0].name for _ in range(50)}, d.cuStreamQuery(a)[0].name)
call(d.cuStreamSynchronize(b))
def wait():
    call(d.cuCtxSetCurrent(context))
    d.cuCtxSynchronize()
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
while waiting.is_alive() and "waits for a kernel that hangs" not in open(LOG).read():
    pass
print(waiting.is_alive(), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_who_waits_for_a_kernel_that_hangs_waits_for_ever(tmp_path: Path) -> None:
    (tmp_path / "model.cu").write_text('extern "C" __global__ void spin() { }')
    log = tmp_path / "log"
    code = HUNG.replace("PATH", repr(str(tmp_path / "model.cu"))).replace("LOG", repr(str(log)))
    with FakeGpu(hang_kernel=1, main_thread=1) as gpu, log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-c", HEAD + code], env=gpu.env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert (done.returncode, done.stdout) == (
            0,
            "{'CUDA_ERROR_NOT_READY'} CUDA_ERROR_NOT_READY\nTrue\n",
        )
        assert gpu["violations"] == 1
        gpu["violations"] = 0


@pytest.mark.parametrize("flags, value", [(0, "7"), (1, "-842150451")], ids=["blocking", "non-blocking"])
def test_the_legacy_stream_waits_for_blocking_streams_only(flags: int, value: str) -> None:
    """-842150451 is 0xCDCDCDCD: what new memory holds."""
    code = f"""
ours, x, y = call(d.cuStreamCreate({flags})), memory(), pinned(0)
call(d.cuMemcpyHtoDAsync(x, pinned(7), 4, ours))
call(d.cuMemsetD8Async(memory(), 0, 4, 1))
call(d.cuStreamSynchronize(1))
call(d.cuMemcpyDtoHAsync(y, x, 4, a))
call(d.cuStreamSynchronize(a))
print(read(y))
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.stdout == f"{value}\n", done.stderr


@pytest.mark.slow
def test_the_gil_and_the_first_thread_are_watched() -> None:
    code = """
import sys, threading
PyDLL = ctypes.PyDLL("libcuda.so.1")
other = threading.Thread(target=lambda: PyDLL.cuCtxPushCurrent(ctypes.c_void_p(int(context))))
other.start(); other.join()
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.stderr.count("called with the GIL") == 1 and "first thread" not in done.stderr
        gpu["violations"] = gpu["main_thread"] = 0
        subprocess.run([sys.executable, "-c", HEAD], env=gpu.env, capture_output=True, check=True)
        assert gpu["violations"] > 0
        gpu["violations"] = 0


RECORDING = """
import threading
mode = d.CUstreamCaptureMode
event = call(d.cuEventCreate(0))
call(d.cuEventRecord(event, b))
call(d.cuStreamBeginCapture(a, mode.CU_STREAM_CAPTURE_MODE_BEGUN))
def other():
    call(d.cuCtxSetCurrent(context))
    call(d.cuThreadExchangeStreamCaptureMode(mode.CU_STREAM_CAPTURE_MODE_OTHER))
    print(d.cuEventQuery(event)[0].name)
thread = threading.Thread(target=other)
thread.start(); thread.join()
print(d.cuStreamEndCapture(a)[0].name)
"""


@pytest.mark.parametrize(
    "begun, other, query, end",
    [
        ("GLOBAL", "GLOBAL", "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED"),
        ("GLOBAL", "RELAXED", "NOT_READY", "SUCCESS"),
        ("THREAD_LOCAL", "GLOBAL", "NOT_READY", "SUCCESS"),
    ],
)
def test_a_query_ends_the_recording_of_another_thread(begun: str, other: str, query: str, end: str) -> None:
    """As torch's issues tell of its own watchdog: unless one of the two threads has said that it does not mind."""
    with FakeGpu() as gpu:
        done = run(gpu, RECORDING.replace("BEGUN", begun).replace("OTHER", other))
        names = [name.removeprefix("CUDA_").removeprefix("ERROR_") for name in done.stdout.split()]
        assert names == [query, end], done.stderr
        assert gpu["violations"] == (query == "STREAM_CAPTURE_UNSUPPORTED")
        gpu["violations"] = 0


@pytest.mark.parametrize(
    "code, said",
    [
        ("d.cuMemcpyHtoDAsync(memory(), ctypes.addressof(keep := ctypes.c_int(7)), 4, a)", "pageable memory was recorded"),
        ("d.cuStreamWaitEvent(a, event, 0)", "waits for an event of outside"),
        ("d.cuMemHostAlloc(4, 0)", "ended the recording"),
    ],
    ids=["pageable", "event", "allocation"],
)  # fmt: skip
def test_what_cannot_be_recorded(code: str, said: str) -> None:
    begin = """
memory = (lambda made: lambda: made)(memory())
event = call(d.cuEventCreate(0))
call(d.cuEventRecord(event, b))
call(d.cuStreamBeginCapture(a, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
"""
    with FakeGpu() as gpu:
        done = run(gpu, begin + code)
        assert said in done.stderr
        gpu["violations"] = 0


def test_a_forked_process_has_no_driver() -> None:
    code = """
import os
if not os.fork():
    print(d.cuMemAlloc(4)[0].value, d.cuInit(0)[0].value, flush=True)
    os._exit(0)
os.wait()
print(d.cuMemAlloc(4)[0].value)
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.stdout == "3 3\n0\n", done.stderr
        assert gpu["violations"] == 2
        gpu["violations"] = 0


def test_pinning_has_a_limit_and_takes_its_time() -> None:
    code = """
import time
start = time.monotonic()
pinned(); pinned()
print(time.monotonic() - start >= 0.1, d.cuMemHostAlloc(4, 0)[0].value)
"""
    with FakeGpu(pin_limit=8, pin_ns=50_000_000) as gpu:
        assert run(gpu, code).stdout == "True 2\n"


@pytest.mark.slow
def test_kernels_have_registers(tmp_path: Path) -> None:
    """128 for each thread: 512 threads have them, one warp more does not start, and the driver says so before."""
    (tmp_path / "model.cu").write_text('extern "C" __global__ void idle() { }')
    code = f"""
from tests.support.fake_cuda.site.fake_nvrtc import code_for
from pathlib import Path
module = call(d.cuModuleLoadData(code_for(Path({str(tmp_path / "model.cu")!r}))))
kernel = call(d.cuModuleGetFunction(module, b"idle"))
print(call(d.cuFuncGetAttribute(d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel)))
print([d.cuLaunchKernel(kernel, 1, 1, 1, n, 1, 1, 0, a, 0, 0)[0].name for n in (512, 544)])
"""
    with FakeGpu(registers=128) as gpu:
        done = run(gpu, code)
        assert done.stdout == "512\n['CUDA_SUCCESS', 'CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES']\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("threshold, kept", [(0, 0), (2**64 - 1, 100_000)])
def test_a_pool_keeps_what_its_threshold_says(threshold: int, kept: int) -> None:
    code = f"""
pool = d.CUmemPoolProps()
pool.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool = call(d.cuMemPoolCreate(pool))
which = d.CUmemPool_attribute
call(d.cuMemPoolSetAttribute(pool, which.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, d.cuuint64_t({threshold})))
x = call(d.cuMemAllocFromPoolAsync(100000, pool, a))
call(d.cuMemFreeAsync(x, a))
call(d.cuStreamSynchronize(a))
print(int(call(d.cuMemPoolGetAttribute(pool, which.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))))
"""
    with FakeGpu() as gpu:
        done = run(gpu, code)
        assert done.stdout == f"{kept}\n", done.stderr


@pytest.mark.slow
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
