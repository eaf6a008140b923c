"""Memory of a GPU on the fake driver: what the pool keeps, when it is trimmed, what is pinned, and how a device whose
work does not end is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add, add_config, get, reason, unload
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = needs_fake_gpu

GROUP = " instance_group { kind: KIND_GPU }"


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_model(tmp_path, name, add_config(GROUP), {"1/model.cu": ADD})
    return tmp_path


def pool(server: ServerProcess) -> tuple[int, int]:
    """Bytes that the device's pool holds, and of these in use, as /metrics has them. They are one reading old."""
    found = {}
    for line in get(server.metrics, "/metrics").splitlines():
        for name in ("reserved", "used"):
            if line.startswith(f"neptrio_gpu_pool_{name}_bytes{{"):
                found[name] = int(float(line.rsplit(" ", 1)[1]))
    return found.get("reserved", -1), found.get("used", -1)


@pytest.mark.slow
def test_the_pool_keeps_what_it_has_until_a_model_goes(two_models: Path) -> None:
    with FakeGpu() as gpu:
        flags = ("--model-control-mode=explicit", "--load-model=*", "--metrics-interval-ms=50")
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            for size in (100_000, 400_000):  # the second one's memory replaces the first one's
                assert add(server, "one", *range(size))[0] == 200
            assert add(server, "two", 1) == (200, [2])
            used = 2 * (1 << 21) + 2 * 65536
            until(lambda: pool(server)[1] == used, "what was outgrown is free")
            assert pool(server)[0] > used, "and kept"
            trims = gpu["trims"]
            unload(server, "one")
            assert gpu["trims"] == trims + 1
            until(lambda: pool(server) == (2 * 65536, 2 * 65536), "nothing unused is held")
        assert gpu.live() == {}


@pytest.mark.slow
@pytest.mark.parametrize("failures, status", [(1, 200), (2, 500)])
def test_after_out_of_memory_the_pool_is_trimmed_and_asked_once_more(
    two_models: Path, failures: int, status: int
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu() as gpu, ServerProcess(two_models, *flags, env=gpu.env) as server:
        gpu["fail_times"], gpu["fail_allocation"] = failures, 1
        allocations = gpu["allocations"]
        assert add(server, "one", 1)[0] == status
        assert gpu["trims"] == 1
        if status == 500:
            assert gpu["allocations"] == allocations + 2
        assert add(server, "one", 1) == (200, [2])
        assert gpu["trims"] == 1


@pytest.mark.slow
def test_a_block_is_pinned_once(two_models: Path) -> None:
    """Pinning takes as long as copying, so blocks are used again."""
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu(journal=1, pin_ns=1_000_000) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            for i in range(5):
                assert add(server, "one", *range(i, 100_000))[0] == 200
        pins = [int(line[1]) for line in gpu.journal() if line[0] == "pin"]
        assert pins == [1 << 19] * 2, "the slot's, and one for outputs"
        assert gpu.live() == {}


@pytest.mark.slow
def test_where_no_more_can_be_pinned_outputs_go_to_ordinary_memory(two_models: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu(journal=1, pin_limit=1 << 19) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            for _ in range(2):
                status, values = add(server, "one", *range(100_000))
                assert status == 200 and values == list(range(1, 100_001))
            assert reason(server, "one") == ("READY", "")
        copies = [line[-1] for line in gpu.journal() if line[0] == "dtoh"]
        assert copies == ["pageable"] * 2
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_batch_that_no_staging_buffer_can_be_pinned_for_fails_alone(two_models: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu(pin_limit=65536) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            status, text = add(server, "one", *range(100_000))
            assert status == 500 and text == "model 'one': CUDA_ERROR_OUT_OF_MEMORY while allocating memory"
            assert add(server, "one", 1) == (200, [2])
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_kernel_with_many_registers_is_refused_with_its_limit(tmp_path: Path) -> None:
    """The driver says how many threads have them; a launch of more would end with error 701."""
    write_model(tmp_path, "one", add_config(GROUP), {"1/model.cu": ADD})
    with FakeGpu(registers=2048) as gpu, ServerProcess(tmp_path, env=gpu.env) as server:
        status, text = add(server, "one", 1)
        assert status == 400
        assert "kernel 'add' can run with at most 32 threads per block, got (64, 1, 1)" in text
        assert gpu["launches"] == 0


CLOSE = """
from benchmarks.gpu import Runner, simple_case
import numpy as np
from neptrio.backends.identity_batch import run_inline
from neptrio.backends.kernel import device
from neptrio.errors import Unavailable
from neptrio.request.infer_request import RequestedOutput
held = device.Device.get(0)
runner = Runner(simple_case())
runner.infer({"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)})
batch = runner.prepare({"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)})
request = batch.requests[0]
request.outputs = [RequestedOutput("OUTPUT0"), RequestedOutput("OUTPUT1")]
for output in request.outputs:
    output.keep_on_device = True
from neptrio.execution.batch import Batch
again = Batch(runner.model, [request])
again.instance = runner
again = runner.instance.prepare(again)
run_inline(again)
runner.close()
held.pool.patience = PATIENCE
del batch, request
held.release()
again = None  # its outputs' memory is given back in the side stream, which has not ended when it is first asked
if PATIENCE:
    held.thread._thread.join(30)
else:  # the thread stays, for those who still ask
    held.thread.settle(30)
print(held.pool.broken)
try:
    device.Device.get(0)
    print("opened")
except Unavailable as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0, 30])
def test_a_stream_whose_work_does_not_end_is_not_destroyed(patience: int) -> None:
    with FakeGpu(main_thread=1) as gpu:
        code = CLOSE.replace("PATIENCE", str(patience))
        done = subprocess.run(
            [sys.executable, "-c", code], env=gpu.env, capture_output=True, text=True, check=False
        )
        name = "" if patience else "CUDA_ERROR_LAUNCH_TIMEOUT"
        last = f"GPU 0 cannot be used any more after {name}; the server must be started anew"
        assert done.stdout.splitlines() == [name, "opened" if patience else last], done.stderr


RECORDING = """
import ctypes
import threading
from cuda.bindings import driver
from benchmarks.gpu import Runner, compare, simple_case, stream_case
import numpy as np
from neptrio.backends.kernel import device

gpu = device.Device.get(0)
closing = [gpu.thread._thread]
driver.cuCtxSetCurrent(gpu.context)
_, stream = driver.cuStreamCreate(1)

def serve():
    held = device.Device.get(1)
    for case, times in ((simple_case(), 8), (stream_case(), 8)):
        runner = Runner(case)
        for i in range(times):
            arrays = case.make(np.random.default_rng(i), 64)
            compare(case, arrays, runner.infer(arrays)[0])
        assert runner.instance.usage()["graph_launches"] or case.name != "simple"
        runner.close()
    block = gpu.pool.block(8)
    gpu.pool.store(block.address, b"12345678")
    fetched = gpu.pool.fetch(block.address, 8)
    assert ctypes.string_at(fetched.address, 8) == b"12345678"
    gpu.memory_info()
    held.release()
    closing.append(held.thread._thread)

driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
server = threading.Thread(target=serve)
server.start()
server.join()
error, graph = driver.cuStreamEndCapture(stream)
print(error.name, len(closing))
driver.cuGraphDestroy(graph)
driver.cuStreamDestroy(stream)
gpu.release()
for thread in closing:
    thread.join(30)
"""


@pytest.mark.slow
def test_graphs_that_other_libraries_record_are_left_alone() -> None:
    """torch and ONNX Runtime record in the mode in which calls of any other thread are refused, and end the recording."""
    with FakeGpu(devices=2, main_thread=1) as gpu:
        done = subprocess.run(
            [sys.executable, "-c", RECORDING], env=gpu.env, capture_output=True, text=True, check=False
        )
        assert done.stdout == "CUDA_SUCCESS 2\n", done.stderr
        assert gpu.live() == {}
