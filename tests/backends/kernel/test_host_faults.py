"""Kernels on the host that go wrong with a client's values: who notices, and what they can reach."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support.repository import write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess

CPU = " instance_group { kind: KIND_CPU }"
HEAD = 'extern "C" __global__ void run(const int* x, int* y) {\n'
ONE = tensors("input", ("X", "INT32", "2")) + tensors("output", ("Y", "INT32", "2"))
LAUNCH = parameter("kernels", "run<<<batch, 2>>>(X, Y)")
AT = "int i = blockIdx.x * 2 + threadIdx.x;\n"
BODIES = {
    # name: (source, values that are well, values that are not)
    "divide": (AT + "y[i] = 100 / x[i];\n", [50, 4], [50, 0], "divided by zero"),
    "smallest": (AT + "y[i] = (-2147483647 - 1) / x[i];\n", [2, 4], [2, -1], "or the smallest one by -1"),
    "rest": (AT + "__syncthreads();\ny[i] = 100 % x[i];\n__syncthreads();\n", [51, 7], [51, 0], "divided by zero"),
    "wild": (AT + "y[i] = x[i] ? x[(long)x[i] << 40] : 3;\n", [0, 0], [0, 1], "SIGSEGV"),
    "clear": (AT + "if (x[i]) memset((char*)y + ((long)x[i] << 40), 0, x[i]);\ny[i] = 1;\n", [0, 0], [0, 9], "SIGSEGV"),
    "deep": (
        AT + "__syncthreads();\nvolatile char* low = (char*)__builtin_frame_address(0) - 65536L * x[i];\n*low = 1;\ny[i] = x[i];\n",
        [0, 0],
        [0, 1],
        "SIGSEGV",
    ),
}  # fmt: skip
EXPECTED = {"divide": [2, 25], "smallest": [-(2**30), -(2**29)], "rest": [49, 2], "wild": [3, 3], "clear": [1, 1], "deep": [0, 0]}  # fmt: skip


def infer(
    client: httpclient.InferenceServerClient, model: str, values: object, shape: tuple[int, ...] = (1, 2)
) -> np.ndarray:
    array = np.array(values, np.int32).reshape(shape)
    tensor = httpclient.InferInput("X", array.shape, "INT32")
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor]).as_numpy("Y")


@pytest.mark.slow
def test_a_fault_fails_the_request_and_nothing_else(tmp_path: Path) -> None:
    for name, (body, _, _, _) in BODIES.items():
        config = kernel_config(4, ONE, LAUNCH, CPU)
        write_model(tmp_path, name, config, {"1/model.cu": HEAD + body + "}\n"})
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        for _ in range(3):  # short kernels run on the loop's own thread after their first time
            for name, (_, good, bad, said) in BODIES.items():
                assert infer(client, name, good).tolist() == [EXPECTED[name]], name
                with pytest.raises(
                    InferenceServerException, match=f"kernel 'run' of model '{name}' failed"
                ) as e:
                    infer(client, name, bad)
                assert said in str(e.value)
                assert infer(client, name, good).tolist() == [EXPECTED[name]], name
        stats = client.get_inference_statistics("divide")["model_stats"][0]["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"]) == (6, 3)


@pytest.mark.slow
def test_requests_of_other_shapes_in_a_batch_are_answered(tmp_path: Path) -> None:
    """They are a run of their own, which did not fail."""
    io = ' input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }'
    io += tensors("output", ("Y", "INT32", "-1"))
    config = kernel_config(
        2, io, parameter("kernels", "run<<<X.size, 1>>>(X, Y)"), parameter("shapes", "Y = [batch, X.shape[1]]"), CPU,
        " dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 60000000 }",
    )  # fmt: skip
    write_model(tmp_path, "m", config, {"1/model.cu": HEAD + "int i = blockIdx.x;\ny[i] = 100 / x[i];\n}\n"})
    with (
        ServerProcess(tmp_path) as server,
        httpclient.InferenceServerClient(server.http, concurrency=2) as client,
    ):
        pending = []
        for values in ([[5, 0]], [[5, 1, 2]]):
            array = np.array(values, np.int32)
            tensor = httpclient.InferInput("X", array.shape, "INT32")
            tensor.set_data_from_numpy(array)
            pending.append(client.async_infer("m", [tensor]))
        with pytest.raises(InferenceServerException, match="divided by zero"):
            pending[0].get_result()
        assert pending[1].get_result().as_numpy("Y").tolist() == [[20, 100, 50]]
        stats = client.get_inference_statistics("m")["model_stats"][0]
        assert stats["execution_count"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE])
def test_a_signal_that_no_kernel_has_caused_ends_the_server(tmp_path: Path, number: int) -> None:
    body = BODIES["divide"][0]
    models = tmp_path / "models"
    write_model(models, "divide", kernel_config(4, ONE, LAUNCH, CPU), {"1/model.cu": HEAD + body + "}\n"})
    # not PYTHONFAULTHANDLER: it shows the other threads while they run, which can be a fault of its own (SIGSEGV)
    with_faulthandler = with_site(tmp_path, "import faulthandler\nfaulthandler.enable(all_threads=False)\n")
    for env, reported in ((None, False), (with_faulthandler, True)):
        server = ServerProcess(models, env=env)
        with httpclient.InferenceServerClient(server.http) as client:
            assert infer(client, "divide", [50, 4]).tolist() == [[2, 25]]
            with pytest.raises(InferenceServerException, match="divided by zero"):
                infer(client, "divide", [50, 0])
        assert server.stop(number) == -number
        assert ("Fatal Python error" in server.log()) == reported


@pytest.mark.slow
def test_outputs_that_no_launch_writes_are_zero(tmp_path: Path) -> None:
    """A launch over an empty grid does not happen; what it would have written must not be what others left there."""
    io = tensors("input", ("X", "INT32", "-1")) + tensors("output", ("Y", "INT32", "256"))
    fill = 'extern "C" __global__ void fill(const int* x, int* y) { y[blockIdx.x] = 77; }\n'
    take = 'extern "C" __global__ void take(const int* s, int* y) { y[blockIdx.x] = s[blockIdx.x]; }\n'
    launches = {
        "output": ("fill<<<(256, X.size), 1>>>(X, Y)", ""),
        "scratch": ("fill<<<(256, X.size), 1>>>(X, S); take<<<256, 1>>>(S, Y)", "S = INT32[256]"),
        "nobody": ("fill<<<256, 1>>>(X, S)", "S = INT32[256]"),
    }
    for name, (kernels, scratch) in launches.items():
        config = kernel_config(0, io, parameter("kernels", kernels), parameter("scratch", scratch), CPU)
        write_model(tmp_path, name, config, {"1/model.cu": fill + take})
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        for _ in range(8):
            for name in launches:
                wanted = 0 if name == "nobody" else 77
                assert set(infer(client, name, [1], (1,)).tolist()) == {wanted}, name
                assert set(infer(client, name, [], (0,)).tolist()) == {0}, name


ADD_INTO = """
extern "C" __global__ void run(const int* x, int* state, int* y, int* next) {
    int i = blockIdx.x * 2 + threadIdx.x;
    state[i] += x[i];
    y[i] = state[i];
    next[i] = state[i];
}
"""
DOUBLE = 'extern "C" __global__ void run(int* x, int* y) {\n' + AT + "x[i] *= 2;\ny[i] = x[i];\n}\n"


@pytest.mark.slow
def test_a_kernel_that_writes_to_its_input_has_a_copy(tmp_path: Path) -> None:
    """What the server gives to several requests, steps or sequences stays as it is."""
    state = (
        ' sequence_batching { state { input_name: "S" output_name: "N" data_type: TYPE_INT32 dims: [ 2 ]'
        ' initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true } } }'
    )
    kernels = parameter("kernels", "run<<<batch, 2>>>(X, S, Y, N)")
    write_model(tmp_path, "sum", kernel_config(2, ONE, kernels, state, CPU), {"1/model.cu": ADD_INTO})
    write_model(tmp_path, "double", kernel_config(2, ONE, LAUNCH, CPU), {"1/model.cu": DOUBLE})
    steps = " ".join(
        f'step {{ model_name: "double" model_version: -1 input_map {{ key: "X" value: "X" }}'
        f' output_map {{ key: "Y" value: "Y{i}" }} }}'
        for i in range(2)
    )
    both = tensors("input", ("X", "INT32", "2")) + tensors(
        "output", ("Y0", "INT32", "2"), ("Y1", "INT32", "2")
    )
    ensemble = f'platform: "ensemble" max_batch_size: 2 {both} ensemble_scheduling {{ {steps} }}'
    write_model(tmp_path, "twice", ensemble)
    array = np.array([[1, 2]], np.int32)
    tensor = httpclient.InferInput("X", array.shape, "INT32")
    tensor.set_data_from_numpy(array)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        for sequence in (1, 2, 3):
            first = client.infer("sum", [tensor], sequence_id=sequence, sequence_start=True)
            assert first.as_numpy("Y").tolist() == [[1, 2]], sequence
        for i in range(4):  # wherever the tensor begins in the request
            answer = client.infer("twice", [tensor], request_id="i" * 4 * i)
            assert answer.as_numpy("Y0").tolist() == answer.as_numpy("Y1").tolist() == [[2, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_an_output_has_a_limit(tmp_path: Path, isolation: str) -> None:
    """Its size follows from a request's shape, which costs a client nothing."""
    io = tensors("input", ("X", "INT32", "-1")) + tensors("output", ("Y", "INT32", "-1"))
    shapes = parameter("shapes", "Y = [batch, X.shape[1] * 1000]")
    apart = parameter("isolation", isolation)
    config = kernel_config(4, io, parameter("kernels", "run<<<1, 1>>>(X, Y)"), shapes, CPU, apart)
    write_model(tmp_path, "m", config, {"1/model.cu": HEAD + "y[0] = 1;\n}\n"})
    with (
        ServerProcess(tmp_path, "--max-output-bytes=8000") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        assert infer(client, "m", [1, 2]).shape == (1, 2000)
        with pytest.raises(InferenceServerException) as refused:
            infer(client, "m", [1, 2, 3], (1, 3))
        assert refused.value.status() == "400"
        assert "would take 12000 bytes, expected at most 8000 (--max-output-bytes)" in str(refused.value)
