"""Kernel and ONNX models with `isolation: process`: what ends with such a process, and what does not.

That they answer as in the server's process, tests/backends/kernel and tests/backends/onnx/test_onnx.py show with both.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.backends.kernel.family import parameter
from tests.backends.kernel.test_device_tensors import SHM, SUM, ensemble, request, step, sum_config
from tests.backends.onnx.test_device_instance import ONNX, PLUS_ONE, OnnxGpu
from tests.support import onnx_models
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_client import GpuClient
from tests.support.gpu_models import ADD, add, add_config, get, held, reason
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

GPU = " instance_group { kind: KIND_GPU }"
CPU = " instance_group { kind: KIND_CPU }"
APART = parameter("isolation", "process") + parameter("ENVIRONMENT", "FAKE_*")
# x[0] decides: -1 sends the process a signal, -2 runs for ever
MISBEHAVING = """
#include <signal.h>
extern "C" __global__ void add(const int* x, int* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    volatile int for_ever = 1;
    if (x[0] == -1) raise(SIGSEGV);
    if (x[0] == -2) while (for_ever) { }
    if (i < n) y[i] = x[i] + 1;
}
"""


def works_again(server: ServerProcess, model: str) -> None:
    until(lambda: add(server, model, 1) == (200, [2]), f"{model}'s next process")
    assert reason(server, model) == ("READY", "")


def process_of(server: ServerProcess, model: str) -> int:
    """The process id of a model's only instance."""
    line = next(
        line
        for line in get(server.metrics, "/metrics").splitlines()
        if line.startswith("neptrio_process_id") and f'model="{model}"' in line
    )
    return int(float(line.rpartition(" ")[2]))


# ---------------------------------------------------------------- errors that end a context


@pytest.mark.slow
@needs_fake_gpu
@pytest.mark.parametrize("code, name", [(700, "ILLEGAL_ADDRESS"), (719, "LAUNCH_FAILED")])
def test_an_error_that_ends_the_context_ends_one_process_and_the_next_one_serves(
    tmp_path: Path, code: int, name: str
) -> None:
    write_model(tmp_path, "apart", add_config(GPU + APART), {"1/model.cu": ADD})
    write_model(tmp_path, "here", add_config(GPU), {"1/model.cu": ADD})
    with FakeGpu(fault_kernel_with=code) as gpu, ServerProcess(tmp_path, env=gpu.env) as server:
        server.until_logged("1 x GPU 0, own processes")
        assert add(server, "apart", 1) == add(server, "here", 1) == (200, [2])
        until(
            lambda: held(server, "apart").keys() >= {("GPU", 0), ("CPU_PINNED", 0)}, "what its process holds"
        )
        for _ in range(2):
            gpu["fault_kernel"] = 1
            status, answer = add(server, "apart", 1)
            assert (status, answer) == (500, f"model 'apart': CUDA_ERROR_{name} while executing")
            until(lambda: reason(server, "apart")[0] == "UNAVAILABLE", "the process's end")
            why = reason(server, "apart")[1]
            assert f"GPU 0 cannot be used any more after CUDA_ERROR_{name} in model 'apart'" in why
            assert "its process ends and is started anew" in why
            assert add(server, "here", 4) == (200, [5]), "it has a context of its own"
            works_again(server, "apart")
            until(lambda: ("GPU", 0) in held(server, "apart"), "what the next process holds")
        assert gpu["resets"] == 0


@pytest.mark.slow
@needs_fake_gpu
def test_every_request_is_answered_when_a_context_ends_under_load(tmp_path: Path) -> None:
    write_model(tmp_path, "apart", add_config(GPU + APART + " dynamic_batching { }"), {"1/model.cu": ADD})
    with FakeGpu(fault_kernel_with=700) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server, ThreadPoolExecutor(8) as pool:
            gpu["fault_kernel"] = 10
            answers = list(pool.map(lambda i: add(server, "apart", i), range(60)))
            for i, (status, answer) in enumerate(answers):
                assert status in (500, 503) or answer == [i + 1]
            assert any(status == 500 for status, _ in answers)
            works_again(server, "apart")


@pytest.mark.slow
@needs_fake_gpu
def test_a_kernel_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """Its process ends it: with the time limit as the answer, and long before the server would kill the process."""
    limit = parameter("EXECUTE_TIMEOUT_SECONDS", "2")
    write_model(tmp_path, "apart", add_config(GPU + APART + limit), {"1/model.cu": ADD})
    with FakeGpu() as gpu, ServerProcess(tmp_path, env=gpu.env) as server:
        assert add(server, "apart", 1) == (200, [2])
        gpu["hang_kernel"] = 1
        assert add(server, "apart", 1) == (
            504,
            "model 'apart': no end of a kernel within 2 s (EXECUTE_TIMEOUT_SECONDS)",
        )
        works_again(server, "apart")


@pytest.mark.slow
@needs_fake_gpu
def test_a_run_of_onnx_runtime_that_hangs_ends_with_its_process(tmp_path: Path) -> None:
    limit = parameter("EXECUTE_TIMEOUT_SECONDS", "2")
    repository = tmp_path / "models"
    write_model(repository, "apart", ONNX + APART + limit, {"1/model.onnx": PLUS_ONE})
    with FakeGpu() as gpu:
        onnx = OnnxGpu(gpu, tmp_path)
        with ServerProcess(repository, env=onnx.env) as server:
            assert add(server, "apart", 1) == (200, [2])
            onnx.hold("run")
            status, answer = add(server, "apart", -2)
            assert status == 504 and "did not return within 2 s (EXECUTE_TIMEOUT_SECONDS)" in answer
            works_again(server, "apart")


@pytest.mark.slow
@needs_fake_gpu
@pytest.mark.parametrize("apart", [False, True], ids=["none", "process"])
def test_onnx_runtimes_word_that_the_context_has_ended_counts(tmp_path: Path, apart: bool) -> None:
    """It shares the context, so in the server's process kernel models on that GPU leave service with it."""
    repository = tmp_path / "models"
    write_model(repository, "kernel", add_config(GPU), {"1/model.cu": ADD})
    write_model(repository, "onnx", ONNX + (APART if apart else ""), {"1/model.onnx": PLUS_ONE})
    with FakeGpu() as gpu:
        with ServerProcess(repository, env=OnnxGpu(gpu, tmp_path).env) as server:
            assert add(server, "onnx", 1) == add(server, "kernel", 1) == (200, [2])
            assert add(server, "onnx", -101)[0] == 500
            assert add(server, "onnx", 1) == (200, [2]), "an error of one call"
            status, answer = add(server, "onnx", -700)
            assert status == 500 and "CUDA failure 700" in answer
            until(lambda: reason(server, "onnx")[0] == "UNAVAILABLE", "the ONNX model left service")
            assert "CUDA_ERROR_ILLEGAL_ADDRESS in model 'onnx'" in reason(server, "onnx")[1]
            if apart:
                assert add(server, "kernel", 1) == (200, [2])
                works_again(server, "onnx")
            else:
                assert reason(server, "kernel")[0] == "UNAVAILABLE" and add(server, "kernel", 1)[0] == 503


# ---------------------------------------------------------------- batches under way


@pytest.mark.slow
@needs_fake_gpu
def test_three_batches_are_under_way(tmp_path: Path) -> None:
    """As in the server's process: one computes, one is copied in and one out. No more, so that batches fill."""
    write_model(tmp_path, "apart", add_config(GPU + APART), {"1/model.cu": ADD})
    with FakeGpu(journal=1, hold=1) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server, ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(add, server, "apart", 10 * i) for i in range(6)]
            until(lambda: gpu["launches"] >= 3, "three launches")
            gpu["hold"] = 0
            assert [a.result(60) for a in answers] == [(200, [10 * i + 1]) for i in range(6)]
        calls = [line[0] for line in gpu.journal() if line[0] in ("launch", "ended")]
        assert calls[:4] == ["launch", "launch", "launch", "ended"]


@pytest.mark.slow
@needs_fake_gpu
def test_durations_are_the_devices(tmp_path: Path) -> None:
    write_model(tmp_path, "apart", add_config(GPU + APART), {"1/model.cu": ADD})
    with FakeGpu(htod_ns=3_000_000, kernel_ns=90_000_000, dtoh_ns=5_000_000) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            assert add(server, "apart", 1) == (200, [2])
            stats = json.loads(get(server.http, "/v2/models/apart/stats"))["model_stats"][0][
                "inference_stats"
            ]
            assert stats["compute_input"]["ns"] >= 3_000_000
            assert stats["compute_infer"]["ns"] >= 90_000_000
            assert stats["compute_output"]["ns"] >= 5_000_000


# ---------------------------------------------------------------- on the host


@pytest.mark.slow
def test_a_kernel_that_crashes_on_the_host_takes_only_its_process_along(tmp_path: Path) -> None:
    limit = parameter("EXECUTE_TIMEOUT_SECONDS", "2")
    write_model(tmp_path, "apart", add_config(CPU + APART + limit), {"1/model.cu": MISBEHAVING})
    with ServerProcess(tmp_path) as server:
        assert add(server, "apart", 1) == (200, [2])
        status, answer = add(server, "apart", -1)
        assert status == 500 and "killed by signal 11 (SIGSEGV)" in answer
        works_again(server, "apart")
        status, answer = add(server, "apart", -2)
        assert status == 504 and "did not return within 2 s (EXECUTE_TIMEOUT_SECONDS)" in answer
        works_again(server, "apart")


@pytest.mark.slow
def test_an_onnx_models_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    model = onnx_models.identity("INT32", ("N", 1))
    write_model(
        tmp_path, "apart", f'backend: "onnxruntime" max_batch_size: 8 {CPU} {APART}', {"1/model.onnx": model}
    )
    write_model(tmp_path, "here", f'backend: "onnxruntime" max_batch_size: 8 {CPU}', {"1/model.onnx": model})
    with ServerProcess(tmp_path) as server:
        assert add(server, "apart", 7) == add(server, "here", 7) == (200, [7])
        os.kill(process_of(server, "apart"), signal.SIGKILL)
        until(lambda: reason(server, "apart")[0] == "UNAVAILABLE", "the process's end")
        assert add(server, "here", 7) == (200, [7])
        until(lambda: add(server, "apart", 8) == (200, [8]), "the next process")


# ---------------------------------------------------------------- configurations


@pytest.mark.slow
@pytest.mark.parametrize(
    "key, value, said",
    [
        ("isolation", "thread", "parameter 'isolation' must be 'none' or 'process', got 'thread'"),
        ("EXECUTE_TIMEOUT_SECONDS", "soon", "must be a number of seconds > 0, got 'soon'"),
        ("MEMORY_LIMIT_BYTES", "much", "parameter 'MEMORY_LIMIT_BYTES' must be a whole number"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, key: str, value: str, said: str) -> None:
    extra = CPU + (APART if key != "isolation" else "") + parameter(key, value)
    write_model(tmp_path, "kernel", add_config(extra), {"1/model.cu": ADD})
    onnx = onnx_models.identity("INT32", ("N", 1))
    write_model(tmp_path, "onnx", f'backend: "onnxruntime" max_batch_size: 8 {extra}', {"1/model.onnx": onnx})
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        for model in ("kernel", "onnx"):
            state, why = reason(server, model)
            assert state == "UNAVAILABLE" and said in why


@pytest.mark.slow
def test_a_setting_decides_for_all_models_of_the_backend_that_do_not_say(tmp_path: Path) -> None:
    write_model(tmp_path, "apart", add_config(CPU), {"1/model.cu": ADD})
    write_model(tmp_path, "here", add_config(CPU + parameter("isolation", "none")), {"1/model.cu": ADD})
    with ServerProcess(tmp_path, "--backend-config=kernel,isolation=process") as server:
        assert re.findall(r"successfully loaded '(\w+)' .*own processes", server.log()) == ["apart"]
        assert add(server, "apart", 1) == add(server, "here", 1) == (200, [2])
    with ServerProcess(
        tmp_path, "--backend-config=kernel,isolation=maybe", "--exit-on-error=false"
    ) as server:
        assert (
            "--backend-config=kernel,isolation must be 'none' or 'process', got 'maybe'"
            in reason(server, "apart")[1]
        )


@pytest.mark.slow
def test_a_load_that_fails_in_the_process_has_its_reason(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "apart",
        add_config(CPU + APART),
        {"1/model.cu": ADD.replace("x[i] + 1", "no_such_thing(x[i])")},
    )
    onnx = 'backend: "onnxruntime" input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] }'
    write_model(
        tmp_path, "onnx", f"{onnx} {CPU} {APART}", {"1/model.onnx": onnx_models.identity("FP32", (1,))}
    )
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        assert "no_such_thing" in reason(server, "apart")[1]
        assert "'Z'" in reason(server, "onnx")[1]


# ---------------------------------------------------------------- tensors that others keep on the device


@pytest.mark.slow
@needs_fake_gpu
def test_states_and_regions_pass_through_the_host(tmp_path: Path) -> None:
    write_model(tmp_path, "sum", sum_config("oldest { }") + APART, {"1/model.cu": SUM})
    write_model(tmp_path, "apart", add_config(GPU + APART), {"1/model.cu": ADD})
    write_model(tmp_path, "here", add_config(GPU), {"1/model.cu": ADD})
    write_model(tmp_path, "both", ensemble(("here", "X", "t"), ("apart", "t", "u"), ("here", "u", "Y")))
    with (
        FakeGpu() as gpu,
        ServerProcess(tmp_path, SHM, env=gpu.env) as server,
        GpuClient(gpu) as device,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        assert step(client, "sum", 1, 5, start=True) == [5] * 4
        assert step(client, "sum", 2, 7, start=True) == [7] * 4
        assert step(client, "sum", 1, 1, end=True) == [6] * 4
        assert step(client, "sum", 2, 1, end=True) == [8] * 4
        assert add(server, "both", 1, 2) == (200, [4, 5])
        address, handle = device.region(0, 4096)
        values = np.array([1, 2, 3, 2**30], np.int32)
        device.write(address, values.tobytes())
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 4096)
        client.infer("apart", **request())
        assert device.read(address + 1024, 16) == (values + 1).tobytes()
        client.unregister_cuda_shared_memory("r")
