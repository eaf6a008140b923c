"""Kernel models on a real GPU. Skipped, saying why, where there is none; with NEPTRIO_REQUIRE_GPU=1 they fail there.
`make test-gpu` runs them."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.backends.kernel import device
from tests.backends.kernel.family import FAMILY, NARROW, Case, kernel_config, parameter, tensors
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device.count() == 0 and os.environ.get("NEPTRIO_REQUIRE_GPU") != "1",
        reason=f"no GPU: {device.why_none() or 'none'}",
    ),
]


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    """Fails a test that was not skipped though there is no GPU."""
    assert device.count(), f"NEPTRIO_REQUIRE_GPU=1, and there is no GPU: {device.why_none()}"


@pytest.mark.parametrize("case", [*FAMILY, NARROW], ids=lambda c: c.name)
def test_against_numpy(case: Case) -> None:
    """Alone and gathered, often enough that graphs are recorded, at several batch sizes."""
    from benchmarks.gpu import Runner, compare

    rng = np.random.default_rng(13)
    runner = Runner(case)
    try:
        for n in (1, 3, runner.max_batch_size, 2):
            for _ in range(6):
                arrays = case.make(rng, n)
                compare(case, arrays, runner.infer(arrays)[0])
        if case.name not in ("votes", "elementwise", "layernorm"):
            sent = [case.make(rng, 1 + i % 3) for i in range(3)]
            for arrays, got in zip(sent, runner.infer(*sent), strict=True):
                compare(case, arrays, got)
    finally:
        runner.close()


def test_several_launches_become_a_graph() -> None:
    from benchmarks.gpu import Runner, compare

    case = next(c for c in FAMILY if c.name == "reduction")
    rng = np.random.default_rng(1)
    runner = Runner(case)
    try:
        for _ in range(20):
            arrays = case.make(rng, 4)
            compare(case, arrays, runner.infer(arrays)[0])
        assert runner.instance.usage()["graph_launches"] >= 10
        bigger = case.make(rng, 60)  # grows the slots: the old graphs are stale
        compare(case, bigger, runner.infer(bigger)[0])
        arrays = case.make(rng, 4)
        compare(case, arrays, runner.infer(arrays)[0])
    finally:
        runner.close()


SLOW = """
extern "C" __global__ void slow(const float* x, float* y, float one, float zero)
{
    float v = x[threadIdx.x];
    for (int i = 0; i < 100000; i++) v = v * one + zero;
    y[threadIdx.x] = v;
}
"""


def test_waiting_batches_are_launched_ahead() -> None:
    """Of a kernel that takes longer than preparing the next launch."""
    from benchmarks.gpu import Runner, Written, compare

    config = kernel_config(
        0,
        tensors("input", ("X", "FP32", "32")),
        tensors("output", ("Y", "FP32", "32")),
        parameter("kernels", "slow<<<1, 32>>>(X, Y, 1.0, 0.0)"),
    )
    case = Written("slow", SLOW, config, lambda rng, n: {}, lambda a: {"Y": a["X"]})
    runner = Runner(case)
    try:
        arrays = {"X": np.arange(32, dtype=np.float32)}
        compare(case, arrays, runner.infer(arrays)[0])
        runner.pipeline([arrays] * 12)
        assert runner.instance.usage()["launched_ahead"] >= 6
    finally:
        runner.close()


def test_staged_batches_keep_their_own_data() -> None:
    """Different inputs one after the other through both slots."""
    from benchmarks.gpu import Runner, compare, stream_case

    case = stream_case()
    runner = Runner(case)
    rng = np.random.default_rng(2)
    try:
        sent = [{"X": rng.standard_normal((8, 4096)).astype(np.float32)} for _ in range(10)]
        batches = [runner.prepare(a) for a in sent]
        for batch in batches:
            runner.mailbox.submit(batch)
        runner.mailbox.close()
        runner.mailbox.run()
        for arrays, batch in zip(sent, batches, strict=True):
            compare(case, arrays, runner.results(batch)[0])
    finally:
        runner.close()


def test_memory_comes_from_the_pool_and_goes_back() -> None:
    from benchmarks.gpu import Runner, stream_case

    gpu = device.Device.get(0)
    before = gpu.statistics().pool_used
    runner = Runner(stream_case())
    runner.infer({"X": np.ones((4, 1 << 20), dtype=np.float32)})
    held = dict((kind, n) for kind, _, n in runner.instance.memory_usage())
    assert held["GPU"] >= 2 * (16 << 20) and held["CPU_PINNED"] >= 16 << 20
    assert gpu.statistics().pool_used >= before + held["GPU"]
    runner.close()
    assert gpu.statistics().pool_used == before
    gpu.release()


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    finally:
        connection.close()


BREAKING = """
extern "C" __global__ void run(const int* x, int* y)
{
    if (x[threadIdx.x] < 0) *(volatile int*)16 = 1;
    y[threadIdx.x] = x[threadIdx.x];
}
"""


def test_an_illegal_address_takes_the_model_out_of_service_until_the_server_starts_anew(
    tmp_path: Path,
) -> None:
    """What the driver says to the load is recorded, for benchmarks/gpu.md."""
    config = kernel_config(
        0,
        tensors("input", ("X", "INT32", "32")),
        tensors("output", ("Y", "INT32", "32")),
        parameter("kernels", "run<<<1, 32>>>(X, Y)"),
    )
    write_model(tmp_path, "breaking", config, {"1/model.cu": BREAKING})

    def infer(value: int) -> tuple[int, Any]:
        tensor = {"name": "X", "datatype": "INT32", "shape": [32], "data": [value] * 32}
        return post(server, "/v2/models/breaking/infer", {"inputs": [tensor]})

    flags = ("--model-control-mode=explicit", "--load-model=breaking")
    with ServerProcess(tmp_path, *flags) as server:
        server.until_logged("1 x GPU 0")
        assert infer(5)[1]["outputs"][0]["data"] == [5] * 32
        status, body = infer(-1)
        assert status == 500 and "CUDA_ERROR_ILLEGAL_ADDRESS" in body["error"]
        status, body = infer(5)
        assert status == 503 and "not at ready state" in body["error"]
        _, index = post(server, "/v2/repository/index", {})
        assert index[0]["state"] == "UNAVAILABLE" and "CUDA_ERROR_ILLEGAL_ADDRESS" in index[0]["reason"]
        status, body = post(server, "/v2/repository/models/breaking/load", {})
        assert status != 200 and "the server must be started anew" in body["error"]
        print("after an illegal address:", body["error"])
    with ServerProcess(tmp_path, *flags) as server:
        assert infer(6)[1]["outputs"][0]["data"] == [6] * 32


def test_in_a_process_of_its_own_only_the_process_ends(tmp_path: Path) -> None:
    """The next process serves, on the same device; a model in the server's process has not noticed anything."""
    config = kernel_config(
        0,
        tensors("input", ("X", "INT32", "32")),
        tensors("output", ("Y", "INT32", "32")),
        parameter("kernels", "run<<<1, 32>>>(X, Y)"),
    )
    # on the fake driver: without its counters, which a process that ends like this leaves as they are
    apart = parameter("isolation", "process") + parameter("ENVIRONMENT", "FAKE_CUDA_DEVICES")
    write_model(tmp_path, "apart", config + apart, {"1/model.cu": BREAKING})
    write_model(tmp_path, "here", config, {"1/model.cu": BREAKING})

    def infer(model: str, value: int) -> tuple[int, Any]:
        tensor = {"name": "X", "datatype": "INT32", "shape": [32], "data": [value] * 32}
        status, body = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})
        return status, body["outputs"][0]["data"] if status == 200 else body["error"]

    with ServerProcess(tmp_path) as server:
        server.until_logged("1 x GPU 0, own processes")
        for value in (5, 6):
            until(lambda value=value: infer("apart", value) == (200, [value] * 32), "its process serves")  # type: ignore[misc]
            status, answer = infer("apart", -1)
            assert status == 500 and "CUDA_ERROR_ILLEGAL_ADDRESS" in answer
            assert infer("here", value) == (200, [value] * 32)


def test_a_request_larger_than_the_memory_fails_alone(tmp_path: Path) -> None:
    config = kernel_config(
        0,
        tensors("input", ("X", "INT32", "1")),
        tensors("output", ("Y", "INT32", "1")),
        parameter("kernels", "run<<<1, 1>>>(X, Y)"),
        parameter("scratch", "HUGE = UINT8[X.shape[0] * 70000000000000 * (1 - parameter.small)]"),
        parameter("small", "0"),
    )
    write_model(tmp_path, "huge", config, {"1/model.cu": BREAKING})
    write_model(
        tmp_path, "small", config.replace('string_value: "0"', 'string_value: "1"'), {"1/model.cu": BREAKING}
    )
    body = {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [3]}]}
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        status, answer = post(server, "/v2/models/huge/infer", body)
        assert status != 200 and answer["error"]
        assert post(server, "/v2/models/small/infer", body)[0] == 200


def test_compiled_code_is_served_and_checked(tmp_path: Path) -> None:
    """A cubin in the version folder; parameter sizes come from the driver."""
    from neptrio.backends.kernel import nvrtc, source

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.cu").write_text(BREAKING)
    gpu = device.Device.get(0)
    code = nvrtc.compile_source(source.read(tmp_path / "src" / "model.cu"), (), gpu.architecture, "m").code
    gpu.release()
    repository = tmp_path / "repository"
    io = (tensors("input", ("X", "INT32", "32")), tensors("output", ("Y", "INT32", "32")))
    for name, launch in (("right", "run<<<1, 32>>>(X, Y)"), ("wrong", "run<<<1, 32>>>(X, Y, 3)")):
        write_model(
            repository, name, kernel_config(0, *io, parameter("kernels", launch)), {"1/model.cubin": code}
        )
    with ServerProcess(repository, "--exit-on-error=false") as server:
        server.until_logged("takes 2 arguments, the config of model 'wrong' gives 3")
        tensor = {"name": "X", "datatype": "INT32", "shape": [32], "data": list(range(32))}
        status, body = post(server, "/v2/models/right/infer", {"inputs": [tensor]})
        assert status == 200 and body["outputs"][0]["data"] == list(range(32))
