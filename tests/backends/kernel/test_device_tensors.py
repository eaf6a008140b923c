"""Tensors that stay in device memory: states of sequences, between two steps, in clients' regions, in Python
models. On the fake driver, which counts every copy and refuses every host access to device memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support.gpu import EAGER, FakeGpu, needs_fake_gpu
from tests.support.gpu_client import GpuClient
from tests.support.gpu_models import ADD, add, add_config, get, held
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = needs_fake_gpu
SHM = "--allow-client-shm=true"


class Copies:
    """How many copies of each kind the server made since the last call of taken()."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._last = self._now()

    def _now(self) -> dict[str, int]:
        return {name: self._gpu[name] for name in ("htod", "dtoh", "dtod", "peer")}

    def taken(self) -> dict[str, int]:
        now = self._now()
        found = {name: now[name] - self._last[name] for name in now}
        self._last = now
        return found


# ---------------------------------------------------------------- implicit state

SUM = """
extern "C" __global__ void sum(const int* x, const int* before, int* after, int* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { after[i] = before[i] + x[i]; y[i] = after[i]; }
}
"""
CONTROLS = """ sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 4 ] } """


def sum_config(strategy: str, listed: bool = False) -> str:
    outputs = [("Y", "INT32", "4"), *([("AFTER", "INT32", "4")] if listed else [])]
    return (
        kernel_config(
            4,
            tensors("input", ("X", "INT32", "4")),
            tensors("output", *outputs),
            parameter("kernels", "sum<<<ceil_div(X.size, 64), 64>>>(X, BEFORE, AFTER, Y, X.size)"),
        )
        + CONTROLS
        + strategy
        + " max_sequence_idle_microseconds: 60000000 } instance_group { kind: KIND_GPU }"
    )


def step(
    client: Any, model: str, sequence: int, value: int, start: bool = False, end: bool = False
) -> list[int]:
    tensor = grpcclient.InferInput("X", [1, 4], "INT32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.int32))
    result = client.infer(model, [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end)
    found: list[int] = result.as_numpy("Y")[0].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_state_stays_on_the_device(tmp_path: Path, strategy: str) -> None:
    write_model(tmp_path, "sum", sum_config(strategy), {"1/model.cu": SUM})
    with FakeGpu(mode=3) as gpu:
        with (
            ServerProcess(tmp_path, env=gpu.env) as server,
            grpcclient.InferenceServerClient(server.grpc) as client,
        ):
            assert step(client, "sum", 1, 5, start=True) == [5] * 4
            assert step(client, "sum", 2, 100, start=True) == [100] * 4
            copies, before = Copies(gpu), gpu["htod_bytes"]
            total = 5
            for value in range(1, 20):
                total += value
                assert step(client, "sum", 1, value) == [total] * 4
                copied = copies.taken()
                assert copied["dtoh"] == 1, "Y alone comes to the host"
                assert copied["dtod"] <= 1
            if "oldest" in strategy:
                # in one copy, at multiples of 256 bytes; the state would lie behind them
                assert gpu["htod_bytes"] - before == 19 * (512 + 4), "X, START and READY go to the device"
            assert step(client, "sum", 2, 1) == [101] * 4
            gpu["mode"] = EAGER  # or what is freed would only be on its way
            assert step(client, "sum", 2, 0) == [101] * 4
            own = held(server, "sum")["GPU", 0] // 65536  # blocks of the instance, besides the states
            until(lambda: gpu["live_allocations"] == own + 2, "each sequence has a state")
            assert step(client, "sum", 1, 0, end=True) == [total] * 4
            assert step(client, "sum", 2, 0) == [101] * 4
            # the device's own thread gives it back
            until(lambda: gpu["live_allocations"] == own + 1, "the state goes with its sequence")
            assert step(client, "sum", 1, 3, start=True) == [3] * 4, "START begins with zeros again"
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_state_that_is_an_output_too_is_sent(tmp_path: Path) -> None:
    write_model(tmp_path, "sum", sum_config("oldest { }", listed=True), {"1/model.cu": SUM})
    with FakeGpu() as gpu:
        with (
            ServerProcess(tmp_path, env=gpu.env) as server,
            grpcclient.InferenceServerClient(server.grpc) as client,
        ):
            tensor = grpcclient.InferInput("X", [1, 4], "INT32")
            for i in range(3):
                tensor.set_data_from_numpy(np.full((1, 4), 2, np.int32))
                result = client.infer("sum", [tensor], sequence_id=7, sequence_start=i == 0)
                assert (
                    result.as_numpy("AFTER")[0].tolist()
                    == result.as_numpy("Y")[0].tolist()
                    == [2 * i + 2] * 4
                )
        assert gpu.live() == {}


@pytest.mark.slow
def test_sequences_batched_together_keep_their_own_states(tmp_path: Path) -> None:
    delay = "direct { max_queue_delay_microseconds: 20000 minimum_slot_utilization: 1.0 }"
    write_model(tmp_path, "sum", sum_config(delay), {"1/model.cu": SUM})
    with FakeGpu(mode=4) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:

            def sequence(number: int) -> None:
                total = 0
                with grpcclient.InferenceServerClient(server.grpc) as client:
                    for i in range(10):
                        total += number * 10 + i
                        got = step(client, "sum", number, number * 10 + i, start=i == 0, end=i == 9)
                        assert got == [total] * 4

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(sequence, range(1, 5)))
        assert gpu.live() == {}


TWO = """
extern "C" __global__ void sum(const int* x, const int* before, int* after, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) after[i] = before[i] + x[i];
}
extern "C" __global__ void show(const int* after, int* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * after[i];
}
"""


@pytest.mark.slow
def test_small_states_do_not_keep_a_plan_from_becoming_a_graph(tmp_path: Path) -> None:
    launches = "sum<<<1, 64>>>(X, BEFORE, AFTER, X.size); show<<<1, 64>>>(AFTER, Y, X.size)"
    config = (
        kernel_config(
            4,
            tensors("input", ("X", "INT32", "4")),
            tensors("output", ("Y", "INT32", "4")),
            parameter("kernels", launches),
        )
        + CONTROLS
        + "oldest { max_candidate_sequences: 4 } } instance_group { kind: KIND_GPU }"
    )
    write_model(tmp_path, "sum", config, {"1/model.cu": TWO})
    with FakeGpu(mode=7) as gpu:
        with (
            ServerProcess(tmp_path, env=gpu.env) as server,
            grpcclient.InferenceServerClient(server.grpc) as client,
        ):
            total = 0
            for i in range(30):
                total += i
                assert step(client, "sum", 1, i, start=i == 0) == [2 * total] * 4
            assert gpu["graph_launches"] >= 10
            assert gpu["dtod"] >= 30, "the state is copied on the device, to and from the graph's memory"
            assert gpu["dtoh"] == 30, "Y alone comes to the host"
        assert gpu.live() == {}


# ---------------------------------------------------------------- ensembles


def ensemble(*steps: tuple[str, str, str], extra: str = "") -> str:
    """X -> ... -> Y through models, each (name, tensor in, tensor out)."""
    body = "".join(
        f' step {{ model_name: "{m}" model_version: -1 input_map {{ key: "X" value: "{a}" }}'
        f' output_map {{ key: "Y" value: "{b}" }} }}'
        for m, a, b in steps
    )
    return (
        'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } '
        f'output {{ name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }} {extra} ensemble_scheduling {{ {body} }}'
    )


PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy() + 1)])
            for r in requests
        ]
"""
IO = (
    'max_batch_size: 8 input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } '
    'output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } '
)


def models(repository: Path) -> None:
    for name, group in (("a", "gpus: [ 0 ]"), ("b", "gpus: [ 0 ]"), ("far", "gpus: [ 1 ]")):
        config = add_config(f" instance_group {{ kind: KIND_GPU {group} }}")
        write_model(repository, name, config, {"1/model.cu": ADD})
    write_model(repository, "host", add_config(" instance_group { kind: KIND_CPU }"), {"1/model.cu": ADD})
    write_model(repository, "python", f'backend: "python" {IO}', {"1/model.py": PYTHON})


@pytest.mark.slow
def test_tensors_stay_on_the_device_between_two_steps(tmp_path: Path) -> None:
    models(tmp_path)
    three = ("a", "X", "t"), ("b", "t", "u"), ("a", "u", "Y")
    write_model(tmp_path, "three", ensemble(*three))
    write_model(tmp_path, "across", ensemble(("a", "X", "t"), ("far", "t", "Y")))
    write_model(
        tmp_path,
        "mixed",
        ensemble(("a", "X", "t"), ("host", "t", "u"), ("python", "u", "v"), ("b", "v", "Y")),
    )
    write_model(tmp_path, "seen", ensemble(("a", "X", "Y"), ("b", "Y", "t")))
    with FakeGpu(devices=2, mode=6) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            copies = Copies(gpu)
            assert add(server, "three", 1, 2) == (200, [4, 5])
            assert copies.taken() == {"htod": 1, "dtoh": 1, "dtod": 0, "peer": 0}
            for name, answer, expected in (
                ("across", [3, 4], {"htod": 1, "dtoh": 1, "dtod": 0, "peer": 1}),
                ("mixed", [5, 6], {"htod": 2, "dtoh": 2, "dtod": 0, "peer": 0}),
                ("seen", [2, 3], {"htod": 1, "dtoh": 1, "dtod": 0, "peer": 0}),
            ):
                assert add(server, name, 1, 2) == (200, answer)
                assert copies.taken() == expected, name
        assert gpu.live() == {}


@pytest.mark.slow
@pytest.mark.parametrize("no_peers", [0, 1])
def test_tensors_of_another_gpu_are_copied_by_the_driver(tmp_path: Path, no_peers: int) -> None:
    """The other GPU is given access to the pool once; where it cannot have that, the driver copies over the host."""
    models(tmp_path)
    write_model(tmp_path, "across", ensemble(("a", "X", "t"), ("far", "t", "Y")))
    with FakeGpu(devices=2, journal=1, no_peers=no_peers) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            for i in range(3):
                assert add(server, "across", i) == (200, [i + 2])
        assert gpu["peer"] == 3
        assert [line for line in gpu.journal() if line[0] == "access"] == [("access", "0", "1")]
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_cached_step_is_not_kept_on_the_device(tmp_path: Path) -> None:
    models(tmp_path)
    path = tmp_path / "a" / "config.pbtxt"
    path.write_text(path.read_text() + " response_cache { enable: true }")
    write_model(tmp_path, "two", ensemble(("a", "X", "t"), ("b", "t", "Y")))
    with FakeGpu(devices=2) as gpu:
        with ServerProcess(tmp_path, "--cache-config=local,size=1048576", env=gpu.env) as server:
            for _ in range(3):
                assert add(server, "two", 1) == (200, [3])
                assert add(server, "a", 1) == (200, [2])
        assert gpu.live() == {}


@pytest.mark.slow
def test_requests_batched_in_both_steps(tmp_path: Path) -> None:
    """Parts of one batch go their own ways; each keeps its own memory alive."""
    for name in ("a", "b"):
        # eight requests are always under way: each batch waits until it is full
        delay = (
            " instance_group { kind: KIND_GPU } "
            "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 60000000 }"
        )
        write_model(tmp_path, name, add_config(delay), {"1/model.cu": ADD})
    write_model(tmp_path, "two", ensemble(("a", "X", "t"), ("b", "t", "Y")))
    with FakeGpu(mode=8) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: add(server, "two", i, -i), range(64)))
            assert answers == [(200, [i + 2, -i + 2]) for i in range(64)]
            assert gpu["dtod"] > 0, "several requests were gathered on the device"
        assert gpu.live() == {}


# ---------------------------------------------------------------- clients' regions


@pytest.fixture
def region_server(tmp_path: Path) -> Iterator[tuple[ServerProcess, FakeGpu, GpuClient]]:
    models(tmp_path)
    write_model(tmp_path, "two", ensemble(("a", "X", "t"), ("b", "t", "Y")))
    write_model(tmp_path, "identity", identity_config(dims="-1", pairs=1))
    with FakeGpu(devices=2, fault_kernel_with=700) as gpu:
        with ServerProcess(
            tmp_path, SHM, "--model-control-mode=explicit", "--load-model=*", env=gpu.env
        ) as server:
            with GpuClient(gpu) as client:
                yield server, gpu, client
        assert gpu.live() == {}


def request(
    offset_in: int = 0, offset_out: int = 1024, n: int = 4, module: Any = grpcclient, names: str = "XY"
) -> Any:
    x, y = {"XY": ("X", "Y"), "01": ("INPUT0", "OUTPUT0")}[names]
    tensor = module.InferInput(x, [1, n], "INT32")
    tensor.set_shared_memory("r", 4 * n, offset_in)
    output = module.InferRequestedOutput(y)
    output.set_shared_memory("r", 4 * n, offset_out)
    return {"inputs": [tensor], "outputs": [output]}


@pytest.mark.parametrize("module", [grpcclient, httpclient], ids=["grpc", "http"])
def test_regions_as_inputs_and_outputs(region_server: Any, module: Any) -> None:
    import base64

    server, gpu, device = region_server
    address, handle = device.region(0, 4096)
    values = np.array([1, 2, 3, 2**30], np.int32)
    device.write(address, values.tobytes())
    with module.InferenceServerClient(server.grpc if module is grpcclient else server.http) as client:
        raw = handle if False else base64.b64encode(handle)
        client.register_cuda_shared_memory("r", raw, 0, 4096)
        copies = Copies(gpu)
        client.infer("a", **request(module=module))
        assert copies.taken() == {"htod": 0, "dtoh": 0, "dtod": 0, "peer": 0}, (
            "read and written where it lies"
        )
        assert device.read(address + 1024, 16) == (values + 1).tobytes()
        # unaligned places are copied on the device: a kernel may rely on alignment
        device.write(address + 4, values.tobytes())
        client.infer("a", **request(4, 1028, module=module))
        assert copies.taken() == {"htod": 0, "dtoh": 0, "dtod": 2, "peer": 0}
        assert device.read(address + 1028, 16) == (values + 1).tobytes()
        # the output over its own input
        client.infer("a", **request(1024, 1024, module=module))
        client.infer("two", **request(0, 2048, module=module))
        expected = np.frombuffer(device.read(address, 16), np.int32) + 2
        assert np.frombuffer(device.read(address + 2048, 16), np.int32).tolist() == expected.tolist()
        # models elsewhere: fetched, and copied out
        for name in ("host", "python", "far"):
            device.write(address, values.tobytes())
            client.infer(name, **request(0, 3072, module=module))
            assert device.read(address + 3072, 16) == (values + 1).tobytes(), name
        client.infer("identity", **request(0, 512, module=module, names="01"))
        assert device.read(address + 512, 16) == values.tobytes()
        client.unregister_cuda_shared_memory("r")
        until(lambda: gpu["live_ipc"] == 0, "the regions are closed")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
            client.infer("a", **request(module=module))


@pytest.mark.slow
@pytest.mark.parametrize("module", [grpcclient, httpclient], ids=["grpc", "http"])
def test_the_loop_does_not_wait_for_a_copy_into_a_region(region_server: Any, module: Any) -> None:
    """A worker waits for it: the server answers others while the device copies nothing."""
    import base64

    server, gpu, device = region_server
    address, handle = device.region(0, 4096)
    values = np.array([[1, 2, 3, 4]], np.int32)
    wanted = request(module=module)
    wanted["inputs"] = [module.InferInput("X", [1, 4], "INT32").set_data_from_numpy(values)]

    def infer() -> None:
        with module.InferenceServerClient(server.grpc if module is grpcclient else server.http) as client:
            client.infer("host", **wanted)

    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)
    before = gpu["htod"]
    gpu["hold"] = 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(infer)
        until(lambda: gpu["htod"] > before, "the copy is queued")
        for _ in range(3):
            assert get(server.http, "/v2/health/ready") == ""
        assert not waiting.done()
        gpu["hold"] = 0
        waiting.result(60)
    assert device.read(address + 1024, 16) == (values + 1).tobytes()


SAME = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["identity", "python"])
def test_the_loop_does_not_wait_for_a_copy_out_of_a_region(tmp_path: Path, model: str) -> None:
    """The device's thread waits for it: others are answered, and what comes for the same instance waits behind it."""
    import base64

    config = identity_config(dims="-1", pairs=1)
    write_model(tmp_path, "identity", config)
    write_model(tmp_path, "python", config.replace('"identity"', '"python"', 1), {"1/model.py": SAME})
    with (
        FakeGpu() as gpu,
        ServerProcess(tmp_path, SHM, env=gpu.env) as server,
        GpuClient(gpu) as device,
        grpcclient.InferenceServerClient(server.grpc) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        address, handle = device.region(0, 4096)
        device.write(address, np.arange(1, 9, dtype=np.int32).tobytes())
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)
        values = np.array([[9, 10, 11, 12]], np.int32)
        plain = [grpcclient.InferInput("INPUT0", [1, 4], "INT32").set_data_from_numpy(values)]
        before = gpu["dtoh"]
        gpu["hold"] = 2
        waiting = [pool.submit(client.infer, model, **request(0, 1024, names="01"))]
        until(lambda: gpu["dtoh"] > before, "the copy is queued")
        waiting.append(pool.submit(client.infer, model, plain))
        waiting.append(pool.submit(client.infer, model, **request(16, 2048, names="01")))
        accepted = f'neptrio_accepted_requests{{model="{model}",version="1"}} 3'
        until(lambda: accepted in get(server.metrics, "/metrics"), "all three have come")
        assert get(server.http, "/v2/health/ready") == ""
        assert not any(one.done() for one in waiting)
        gpu["hold"] = 0
        assert waiting[1].result(60).as_numpy("OUTPUT0").tolist() == values.tolist()
        for one, place, found in ((waiting[0], 1024, [1, 2, 3, 4]), (waiting[2], 2048, [5, 6, 7, 8])):
            one.result(60)
            assert np.frombuffer(device.read(address + place, 16), np.int32).tolist() == found
        client.unregister_cuda_shared_memory("r")


def test_a_region_of_a_foreign_handle_is_refused(region_server: Any) -> None:
    server, gpu, device = region_server
    _, handle = device.region(0, 4096)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for raw, where, size, problem in (
            (b"\1" * 64, 0, 64, "CUDA_ERROR_INVALID_VALUE while opening the memory handle"),
            (handle, 1, 64, "CUDA_ERROR_INVALID_CONTEXT while opening the memory handle"),
            (handle, 0, 1 << 20, "the allocation has 4096 bytes, the region asks for 1048576"),
            (handle, 5, 64, "GPU 5 was asked for and there are 2"),
        ):
            import base64

            with pytest.raises(InferenceServerException, match=problem):
                client.register_cuda_shared_memory("r", base64.b64encode(raw), where, size)
    until(lambda: gpu["live_ipc"] == 0, "the device's thread has closed the region that was too small")


def test_a_name_is_of_a_region_of_one_kind(region_server: Any) -> None:
    """Whichever came first: a request for it says no more than the name."""
    import base64

    import tritonclient.utils.shared_memory as shm

    server, _, device = region_server
    _, handle = device.region(0, 4096)
    raw, key = base64.b64encode(handle), f"/neptrio_test_one_kind_{os.getpid()}"
    made = shm.create_shared_memory_region("r", key, 4096)
    try:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            client.register_cuda_shared_memory("r", raw, 0, 4096)
            with pytest.raises(InferenceServerException, match="shared memory region 'r' already in manager"):
                client.register_system_shared_memory("r", key, 4096)
            client.unregister_system_shared_memory("r")
            assert "r" in client.get_cuda_shared_memory_status().regions, "that is the other kind's verb"
            client.unregister_cuda_shared_memory("r")
            client.register_system_shared_memory("r", key, 4096)
            with pytest.raises(InferenceServerException, match="shared memory region 'r' already in manager"):
                client.register_cuda_shared_memory("r", raw, 0, 4096)
    finally:
        shm.destroy_shared_memory_region(made)


def test_a_region_is_lost_with_its_context(region_server: Any) -> None:
    import base64

    server, gpu, device = region_server
    address, handle = device.region(0, 4096)
    device.write(address, bytes(4096))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)
        gpu["fault_kernel"] = 1
        with pytest.raises(InferenceServerException, match="CUDA_ERROR_ILLEGAL_ADDRESS while executing"):
            client.infer("a", **request())
        with pytest.raises(InferenceServerException, match="region 'r' was lost when GPU 0 failed"):
            client.infer("identity", **request(names="01"))
        with pytest.raises(InferenceServerException, match="region 'r' was lost when GPU 0 failed"):
            client.infer("a", **request())
        client.unregister_cuda_shared_memory("r")
        with pytest.raises(
            InferenceServerException,
            match="cannot be used any more after CUDA_ERROR_ILLEGAL_ADDRESS in model 'a'",
        ):
            client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)


@pytest.mark.slow
def test_a_region_may_be_a_part_of_an_allocation(region_server: Any) -> None:
    """Its handle opens the whole block, and the region may not go beyond the block's end."""
    import base64

    server, _, device = region_server
    address, handle = device.region(0, 4096, 1024)
    device.write(address, bytes(3072))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="has 3072 bytes, the region asks for 4096"):
            client.register_cuda_shared_memory("part", base64.b64encode(handle), 0, 4096)
        client.register_cuda_shared_memory("part", base64.b64encode(handle), 0, 3072)
        client.unregister_cuda_shared_memory("part")


def test_two_regions_may_be_the_same_memory(region_server: Any) -> None:
    """The driver opens it once, at one address, and it stays open until both are gone."""
    import base64

    server, gpu, device = region_server
    before = gpu["live_ipc"]
    address, handle = device.region(0, 4096)
    values = np.array([[1, 2, 3]], np.int32)
    device.write(address, values.tobytes().ljust(4096, b"\0"))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for name in ("first", "second"):
            client.register_cuda_shared_memory(name, base64.b64encode(handle), 0, 4096)
        assert gpu["live_ipc"] == before + 1
        client.unregister_cuda_shared_memory("first")
        tensor = grpcclient.InferInput("X", [1, 3], "INT32")
        tensor.set_shared_memory("second", 12)
        output = grpcclient.InferRequestedOutput("Y")
        output.set_shared_memory("second", 12, 1024)
        client.infer("a", [tensor], outputs=[output])
        assert np.frombuffer(device.read(address + 1024, 12), np.int32).tolist() == [2, 3, 4]
        client.unregister_cuda_shared_memory("second")
        until(lambda: gpu["live_ipc"] == before, "the memory is closed")


# ---------------------------------------------------------------- Python models

DEVICE_PYTHON = """
import triton_python_backend_utils as pb_utils

class Foreign:  # an array of another library
    def __init__(self, tensor):
        self.tensor = tensor
    def __dlpack__(self, stream=None):
        assert stream == 1, stream
        return self.tensor.to_dlpack()
    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "X")
            assert not x.is_cpu() and x.__dlpack_device__()[0] == 2, x
            try:
                x.as_numpy()
            except pb_utils.TritonModelException as error:
                assert "is in GPU memory" in str(error)
            way = r.request_id()
            if way == "bls":
                y = pb_utils.InferenceRequest(
                    model_name="a", requested_output_names=["Y"], inputs=[x],
                    preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
                ).exec().output_tensors()[0]
                assert not y.is_cpu()
            else:
                y = {"capsule": x.to_dlpack(), "object": Foreign(x)}.get(way, x)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", y)]))
        return responses
"""


@pytest.mark.slow
def test_python_models_take_device_memory_through_dlpack(tmp_path: Path) -> None:
    models(tmp_path)
    flag = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
    config = f'backend: "python" {IO} {flag} instance_group {{ kind: KIND_GPU gpus: [ 0 ] count: 2 }}'
    write_model(tmp_path, "device", config, {"1/model.py": DEVICE_PYTHON})
    write_model(tmp_path, "last", ensemble(("a", "X", "t"), ("device", "t", "Y")))
    write_model(tmp_path, "middle", ensemble(("a", "X", "t"), ("device", "t", "u"), ("b", "u", "Y")))
    with FakeGpu(devices=2) as gpu:
        with (
            ServerProcess(tmp_path, env=gpu.env) as server,
            grpcclient.InferenceServerClient(server.grpc) as client,
        ):
            copies = Copies(gpu)
            tensor = grpcclient.InferInput("X", [1, 3], "INT32")
            tensor.set_data_from_numpy(np.array([[1, 2, 3]], np.int32))
            for name, more in (("last", 1), ("middle", 2)):
                for way in ("", "capsule", "object", "bls"):
                    got = client.infer(name, [tensor], request_id=way).as_numpy("Y")
                    assert got.tolist() == [[v + more + (way == "bls") for v in (1, 2, 3)]]
                    copied = copies.taken()
                    assert (copied["htod"], copied["dtoh"]) == (1, 1), (name, way, copied)
        assert gpu.live() == {}


# ---------------------------------------------------------------- traces


@pytest.mark.slow
def test_traces_have_the_values_of_device_tensors(tmp_path: Path) -> None:
    models(tmp_path / "models")
    write_model(tmp_path / "models", "two", ensemble(("a", "X", "t"), ("b", "t", "Y")))
    file = tmp_path / "trace.json"
    flags = (f"--trace-config=triton,file={file}", "--trace-config=rate=1",
             "--trace-config=level=TIMESTAMPS", "--trace-config=level=TENSORS")  # fmt: skip
    with FakeGpu(devices=2) as gpu:
        with ServerProcess(tmp_path / "models", *flags, env=gpu.env) as server:
            assert add(server, "two", 1, 2) == (200, [3, 4])
        written = next(iter(tmp_path.glob("trace.json*"))).read_text()
        rows = json.loads(written)
        found = {
            (row["activity"], row["tensor"]["name"], row["tensor"]["data"]) for row in rows if "tensor" in row
        }
        assert ("TENSOR_BACKEND_INPUT", "X", "2,3") in found, "the second step's input, fetched for the trace"
        stamps = [stamp["name"] for row in rows for stamp in row.get("timestamps", ())]
        assert stamps.count("COMPUTE_INPUT_END") == stamps.count("COMPUTE_OUTPUT_START") == 2
        assert gpu.live() == {}


@pytest.mark.slow
def test_the_statistics_endpoint_counts_both_steps(tmp_path: Path) -> None:
    models(tmp_path)
    write_model(tmp_path, "two", ensemble(("a", "X", "t"), ("b", "t", "Y")))
    with FakeGpu(devices=2, kernel_ns=2_000_000) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            assert add(server, "two", 1) == (200, [3])
            stats = json.loads(get(server.http, "/v2/models/two/stats"))["model_stats"][0]["inference_stats"]
            assert stats["compute_infer"]["ns"] >= 4_000_000
