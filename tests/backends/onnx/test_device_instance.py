"""ONNX models on a GPU among other models there: on the fake driver, with an ONNX Runtime of our own on it."""

from __future__ import annotations

import base64
import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from onnx import helper

from neptrio.backends.onnx.device_instance import DeviceInstance
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import InferRequest, ModelCore, RequestedOutput, tensor_at
from tests.backends.kernel.family import parameter
from tests.backends.kernel.test_device_tensors import CONTROLS, SHM, ensemble, request, step
from tests.support import onnx_models
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_client import GpuClient
from tests.support.gpu_models import ADD, add, add_config, get, post, reason, unload
from tests.support.onnx_instances import context
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = needs_fake_gpu
STAND_IN = Path(__file__).parents[2] / "support" / "fake_onnxruntime"
NAMES = ("X", "Y")
PLUS_ONE = onnx_models.identity("INT32", ("N", None), NAMES)  # the stand-in adds 1, whatever the graph says
SUM = onnx_models.model(
    [
        helper.make_node("Add", ["X", "BEFORE"], ["AFTER"]),
        helper.make_node("Identity", ["AFTER"], ["Y"]),
        helper.make_node("Identity", ["START"], ["ignored"]),
    ],
    [onnx_models.tensor(name, "INT32", ("N", 4)) for name in ("X", "BEFORE")]
    + [onnx_models.tensor(name, "INT32", ("N", 1)) for name in ("START", "READY")],
    [onnx_models.tensor(name, "INT32", ("N", 4)) for name in ("Y", "AFTER")],
)
GPU = " instance_group { kind: KIND_GPU gpus: [ 0 ] } "
ONNX = f'backend: "onnxruntime" max_batch_size: 8 {GPU}'


class OnnxGpu:
    """A fake GPU, and what the stand-in for ONNX Runtime was asked."""

    def __init__(self, gpu: FakeGpu, folder: Path, **told: str) -> None:
        self.log = folder / "onnx.log"
        self.log.touch()
        path = f"{STAND_IN}:{gpu.env['PYTHONPATH']}"
        self.latches = folder / "latches"
        self.latches.mkdir()
        latches = {"FAKE_ORT_LOG": str(self.log), "FAKE_ORT_LATCHES": str(self.latches)}
        self.env = gpu.env | {"PYTHONPATH": path} | latches | told

    def hold(self, name: str) -> None:
        """What has that name hangs from now on: "run" or "release"."""
        os.mkfifo(self.latches / name)

    def let_go(self, name: str) -> None:
        """What hangs goes on."""
        (self.latches / name).write_bytes(b"")

    def said(self, key: str) -> list[Any]:
        """The values of `key` in the stand-in's log, and the log is empty again."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        assert not any("on_the_loop" in line for line in lines)
        return [line[key] for line in lines if key in line]

    def has(self, key: str, value: str) -> bool:
        """Whether the stand-in's log has that."""
        return f'"{key}": "{value}"' in self.log.read_text()


@pytest.fixture
def onnx_gpu(tmp_path: Path) -> Iterator[tuple[FakeGpu, OnnxGpu]]:
    with FakeGpu(devices=2) as gpu:
        onnx = OnnxGpu(gpu, tmp_path)
        yield gpu, onnx
        assert gpu.live() == {}
        assert "on_the_loop" not in onnx.log.read_text()


def models(folder: Path) -> Path:
    repository = folder / "models"
    write_model(repository, "a", add_config(GPU), {"1/model.cu": ADD})
    write_model(repository, "onnx", ONNX, {"1/model.onnx": PLUS_ONE})
    return repository


@pytest.mark.slow
def test_tensors_stay_on_the_device_between_models(tmp_path: Path, onnx_gpu: tuple[FakeGpu, OnnxGpu]) -> None:
    repository = models(tmp_path)
    write_model(repository, "three", ensemble(("a", "X", "t"), ("onnx", "t", "u"), ("a", "u", "Y")))
    write_model(repository, "last", ensemble(("a", "X", "t"), ("onnx", "t", "Y")))
    _, onnx = onnx_gpu
    with ServerProcess(repository, env=onnx.env) as server:
        server.until_logged("1 x GPU 0")
        asked = onnx.said("providers")  # the first ones are for looking at the model
        assert asked[-1] == [["CUDAExecutionProvider", {"device_id": "0"}], "CPUExecutionProvider"]
        assert add(server, "three", 1, 2) == (200, [4, 5])
        assert onnx.said("bound") == [{"X": "cuda", "Y": "cuda"}]
        assert add(server, "last", 1, 2) == (200, [3, 4])
        assert onnx.said("bound") == [{"X": "cuda", "Y": "cpu"}]
        assert add(server, "onnx", 1, 2) == (200, [2, 3])
        assert onnx.said("plain") == [["X"]]


@pytest.mark.slow
def test_requests_are_gathered_on_the_device(tmp_path: Path, onnx_gpu: tuple[FakeGpu, OnnxGpu]) -> None:
    """Four requests from the step before, and four of clients, in one batch; each gets its own rows."""
    delay = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 60000000 }"
    repository = models(tmp_path)
    write_model(repository, "onnx", ONNX + delay, {"1/model.onnx": PLUS_ONE})
    write_model(repository, "three", ensemble(("a", "X", "t"), ("onnx", "t", "u"), ("a", "u", "Y")))
    _, onnx = onnx_gpu
    with ServerProcess(repository, env=onnx.env) as server, ThreadPoolExecutor(8) as pool:
        asked = [(name, i) for i in range(4) for name in ("three", "onnx")]
        answers = list(pool.map(lambda row: add(server, row[0], row[1], 100), asked))
        plus = {"three": 3, "onnx": 1}
        assert answers == [(200, [i + plus[name], 100 + plus[name]]) for name, i in asked]
        assert onnx.said("bound") == [{"X": "cuda", "Y": "cuda"}]


@pytest.mark.slow
def test_clients_regions_are_bound(tmp_path: Path, onnx_gpu: tuple[FakeGpu, OnnxGpu]) -> None:
    gpu, onnx = onnx_gpu
    values = np.array([1, 2, 3, 2**30], np.int32)
    with (
        ServerProcess(models(tmp_path), SHM, env=onnx.env) as server,
        GpuClient(gpu) as device,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        address, handle = device.region(0, 4096)
        device.write(address, values.tobytes())
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)
        client.infer("onnx", **request())
        assert device.read(address + 1024, 16) == (values + 1).tobytes()
        # no kernel may be given an address that it cannot rely on: such inputs are copied first
        device.write(address + 4, values.tobytes())
        client.infer("onnx", **request(4, 1028))
        assert device.read(address + 1028, 16) == (values + 1).tobytes()
        assert onnx.said("bound") == [{"X": "cuda", "Y": "cuda"}] * 2
        # on another GPU: through the host
        address, handle = device.region(1, 4096)
        device.write(address, values.tobytes())
        client.unregister_cuda_shared_memory("r")
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 1, 4096)
        client.infer("onnx", **request())
        assert device.read(address + 1024, 16) == (values + 1).tobytes()
        client.unregister_cuda_shared_memory("r")


@pytest.mark.slow
def test_states_stay_on_the_device(tmp_path: Path, onnx_gpu: tuple[FakeGpu, OnnxGpu]) -> None:
    io = (
        'input { name: "X" data_type: TYPE_INT32 dims: [ 4 ] } '
        'output { name: "Y" data_type: TYPE_INT32 dims: [ 4 ] }'
    )
    write_model(
        tmp_path / "models",
        "sum",
        f"{ONNX} {io} {CONTROLS} oldest {{ }} max_sequence_idle_microseconds: 60000000 }}",
        {"1/model.onnx": SUM},
    )
    _, onnx = onnx_gpu
    with (
        ServerProcess(tmp_path / "models", env=onnx.env) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        assert step(client, "sum", 1, 5, start=True) == [5] * 4
        assert step(client, "sum", 2, 7, start=True) == [7] * 4
        onnx.said("bound")
        assert step(client, "sum", 1, 1) == [6] * 4
        assert step(client, "sum", 2, 1, end=True) == [8] * 4
        assert step(client, "sum", 1, 1, end=True) == [7] * 4
        for said in onnx.said("bound"):
            assert (said["BEFORE"], said["AFTER"], said["Y"]) == ("cuda", "cuda", "cpu")


@pytest.mark.slow
def test_a_provider_that_fails_is_no_silent_cpu(tmp_path: Path) -> None:
    """ONNX Runtime would run on the CPU, and say so on standard error alone."""
    with FakeGpu() as gpu:
        onnx = OnnxGpu(gpu, tmp_path, FAKE_ORT_LACKS="CUDAExecutionProvider")
        with ServerProcess(models(tmp_path), "--exit-on-error=false", env=onnx.env) as server:
            state, why = reason(server, "onnx")
            assert state == "UNAVAILABLE"
            assert (
                "model 'onnx' asks for CUDAExecutionProvider, and ONNX Runtime made a session without it"
                in why
            )
            assert onnx.said("preloaded") == [True], "CUDA's libraries were loaded beforehand"
            assert add(server, "a", 1) == (200, [2])
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_broken_context_takes_onnx_models_out_of_service_too(
    tmp_path: Path, onnx_gpu: tuple[FakeGpu, OnnxGpu]
) -> None:
    """They share the context with the kernel that broke it."""
    gpu, onnx = onnx_gpu
    with ServerProcess(models(tmp_path), env=onnx.env) as server:
        assert add(server, "onnx", 1) == (200, [2])
        gpu["fault_kernel_with"], gpu["fault_kernel"] = 700, 1
        assert add(server, "a", 1)[0] == 500
        until(lambda: reason(server, "onnx")[0] == "UNAVAILABLE", "the ONNX model left service")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS in model 'a'" in reason(server, "onnx")[1]
        assert post(server, "/v2/models/onnx/infer", {"inputs": []})[0] != 200


# ---------------------------------------------------------------- what hangs on the device

EXPLICIT = ("--model-control-mode=explicit", "--exit-timeout-secs=60")


def limited(seconds: str) -> str:
    return ONNX + parameter("EXECUTE_TIMEOUT_SECONDS", seconds)


def hanging_models(folder: Path, **seconds: str) -> tuple[Path, list[str]]:
    """ONNX models with these limits, the kernel model `a`, and the flags that load them all."""
    repository = folder / "models"
    write_model(repository, "a", add_config(GPU), {"1/model.cu": ADD})
    for name, limit in seconds.items():
        write_model(repository, name, limited(limit), {"1/model.onnx": PLUS_ONE})
    return repository, [*EXPLICIT, *(f"--load-model={name}" for name in ("a", *seconds))]


def accepted(server: ServerProcess, model: str, requests: int) -> None:
    line = f'neptrio_accepted_requests{{model="{model}",version="1"}} {requests}'
    until(lambda: line in get(server.metrics, "/metrics"), f"{requests} requests wait")


@pytest.mark.slow
def test_a_run_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """Its batch, what waits behind it and other models' runs fail; unload, load and shutdown do not wait for it."""
    repository, flags = hanging_models(tmp_path, one="2", two="300")
    with FakeGpu() as gpu, ThreadPoolExecutor(4) as pool:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, env=onnx.env) as server:
            for model in ("a", "one", "two"):
                assert add(server, model, 1) == (200, [2])
            onnx.hold("run")
            hanging = pool.submit(add, server, "two", -2)
            until(lambda: onnx.has("hangs", "run"), "the run hangs")
            behind = [pool.submit(add, server, "two", 1) for _ in range(3)]
            accepted(server, "two", 4)
            why = "no end of a run within 2 s (EXECUTE_TIMEOUT_SECONDS)"
            assert add(server, "one", -2) == (504, f"model 'one': {why}")
            status, answer = hanging.result(60)
            given_up = f"GPU 0 cannot be used any more after {why} in model 'one'"
            assert status == 500 and answer.startswith(f"model 'two': {given_up}")
            for one in behind:
                status, answer = one.result(60)
                assert status == 503 and given_up in answer
            for model in ("a", "one", "two"):
                assert given_up in reason(server, model)[1]
                assert add(server, model, 1)[0] == 503
            unload(server, "one")
            server.until_logged("an execution of one_0_0 has not returned: its thread is left behind")
            status, body = post(server, "/v2/repository/models/one/load")
            assert status >= 400 and given_up in body["error"]
            assert server.stop() == 0
        assert not onnx.has("on_the_loop", "a session")


@pytest.mark.slow
def test_a_run_that_hangs_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    repository, flags = hanging_models(tmp_path, one="300")
    with FakeGpu() as gpu, ThreadPoolExecutor(1) as pool:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, "--exit-timeout-secs=2", env=onnx.env) as server:
            onnx.hold("run")
            hanging = pool.submit(add, server, "one", -2)
            until(lambda: onnx.has("hangs", "run"), "the run hangs")
            assert server.stop() == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            hanging.result(60)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_returns_late(tmp_path: Path) -> None:
    repository, flags = hanging_models(tmp_path, one="2")
    with FakeGpu() as gpu:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, env=onnx.env) as server:
            onnx.hold("run")
            assert add(server, "one", -2)[0] == 504
            onnx.let_go("run")
            until(lambda: onnx.has("goes_on", "run"), "the run goes on")
            assert add(server, "one", 1)[0] == 503
            unload(server, "one")
            assert server.stop() == 0


@pytest.mark.slow
def test_an_unload_does_not_wait_for_another_models_run(tmp_path: Path) -> None:
    """What would wait for the whole device is given back when the run has ended."""
    repository, flags = hanging_models(tmp_path, one="300", two="1")
    with FakeGpu() as gpu, ThreadPoolExecutor(1) as pool:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, env=onnx.env) as server:
            assert add(server, "a", *range(100_000))[0] == 200
            onnx.hold("run")
            hanging = pool.submit(add, server, "one", -2)
            until(lambda: onnx.has("hangs", "run"), "the run hangs")
            unload(server, "a")
            assert gpu["live_modules"] == 1
            unload(server, "two")
            server.until_logged("two_0_0's session is released when that has ended")
            onnx.let_go("run")
            assert hanging.result(60) == (200, [-1])
            until(lambda: gpu["live_modules"] == 0, "the module is given back")
            assert add(server, "one", 1) == (200, [2]), "the device serves"
        assert gpu.live() == {}
        assert "on_the_loop" not in onnx.log.read_text()


@pytest.mark.slow
def test_a_session_is_not_released_while_a_kernel_hangs(tmp_path: Path) -> None:
    """The driver would hold up the thread that does it: the fake driver tells that as a violation."""
    repository, flags = hanging_models(tmp_path, one="1")
    with FakeGpu() as gpu, ThreadPoolExecutor(1) as pool:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, "--exit-timeout-secs=2", env=onnx.env) as server:
            gpu["hang_kernel"] = 1
            hanging = pool.submit(add, server, "a", 1)
            until(lambda: gpu["hang_kernel"] == 0, "the kernel hangs")
            unload(server, "one")
            server.until_logged("one_0_0's session is released when that has ended")
            assert server.stop() == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            hanging.result(60)


@pytest.mark.slow
def test_a_release_that_hangs_ends_in_time(tmp_path: Path) -> None:
    repository, flags = hanging_models(tmp_path, one="2", two="300")
    with FakeGpu() as gpu:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, env=onnx.env) as server:
            onnx.hold("release")
            unload(server, "one")
            until(lambda: onnx.has("hangs", "release"), "the release hangs")
            why = "GPU 0 cannot be used any more after no end of the release of a session within 2 s"
            until(
                lambda: why in reason(server, "a")[1] and why in reason(server, "two")[1],
                "the device is given up",
            )
            server.until_logged("the release of one_0_0's session hangs on GPU 0: its thread is left behind")
            unload(server, "two")
            assert server.stop() == 0
        assert not onnx.has("on_the_loop", "a session")


@pytest.mark.slow
def test_a_release_that_hangs_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    repository, flags = hanging_models(tmp_path, one="300")
    with FakeGpu() as gpu:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, *flags, "--exit-timeout-secs=2", env=onnx.env) as server:
            onnx.hold("release")
            assert server.stop() == 1
        assert onnx.has("hangs", "release")


def test_an_input_that_is_handed_through_is_copied(tmp_path: Path) -> None:
    """Its memory is the request's, perhaps a client's region, and the output may live longer."""
    copied: list[tuple[int, int, int]] = []
    pool = SimpleNamespace(
        broken="",
        block=lambda nbytes: SimpleNamespace(address=1 << 20),
        copy=lambda to, source, nbytes: copied.append((to, source, nbytes)),
    )

    def run_bound(names: list[str], tensors: list[Any], ready: Any, device: int, kept: set[str]) -> list[Any]:
        return [tensor_at("Y", 8, (1, 4), tensors[0].address, 16, object(), 2, device)]

    instance = DeviceInstance(context(tmp_path, PLUS_ONE), "m_0_0", "GPU", 0, 300.0)
    instance._device = SimpleNamespace(pool=pool, look_again=lambda: None)  # type: ignore[assignment]
    instance.takes_device_memory = True
    instance.session = SimpleNamespace(run_bound=run_bound)
    instance._outputs = ["Y"]
    asked = InferRequest()
    asked.inputs = [tensor_at("X", 8, (1, 4), 4096, 16, object(), 2, 0)]
    asked.outputs = [RequestedOutput("Y")]
    asked.outputs[0].keep_on_device = True
    batch = Batch(ModelCore("m", "1"), [asked])
    instance.execute(batch)
    (output,) = batch.responses[0].outputs
    assert (output.address, output.memory_kind) == (1 << 20, 2)
    assert copied == [(1 << 20, 4096, 16)]
