"""An unloaded model is freed by reference counts, at once: the collector, which would stop the loop, is not needed.

The server is inside the test, whose collector is off; the models are used over real sockets.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.execution.backend import Backend, BackendInstance
from neptrio.execution.instance_core import InstanceCore, PoolCore
from neptrio.request.infer_request import ModelCore
from neptrio.scheduling.base import Scheduler
from tests.support import onnx_models
from tests.support.embedded import EmbeddedServer
from tests.support.repository import write_model
from tests.support.waiting import until

DIMS = "max_batch_size: 8 input [ { name: 'X' data_type: TYPE_%s dims: [ 4 ] } ] output [ { name: 'Y' data_type: TYPE_%s dims: [ 4 ] } ] "
IO, INTS, TEXTS = (DIMS % (kind, kind) for kind in ("FP32", "INT32", "STRING"))
IDENTITY = "backend: 'identity' " + IO
ONNX = "backend: 'onnxruntime' "
PYTHON = "backend: 'python' " + IO
DYNAMIC = "dynamic_batching { max_queue_delay_microseconds: 100 default_queue_policy { default_timeout_microseconds: 60000000 } } "
WARM = "model_warmup { name: 'w' batch_size: 2 count: 2 inputs { key: 'X' value { data_type: TYPE_FP32 dims: 4 zero_data: true } } } "
TWO = "instance_group { count: 2 } "
STEP = "{ model_name: '%s' model_version: -1 input_map { key: 'X' value: '%s' } output_map { key: 'Y' value: '%s' } } "
KERNELS = "instance_group { kind: KIND_CPU } parameters { key: 'kernels' value { string_value: 'run<<<1, X.size>>>(X, Y)' } } "
KERNEL = 'extern "C" __global__ void run(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'


def parameter(key: str, value: str) -> str:
    return f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }} "


def sequences(strategy: str) -> str:
    return (
        f"sequence_batching {{ max_sequence_idle_microseconds: 3600000000 {strategy} control_input [ {{ name: 'S' "
        "control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] state [ { input_name: 'IN' "
        "output_name: 'OUT' data_type: TYPE_INT32 dims: [ 4 ] initial_state { data_type: TYPE_INT32 dims: [ 4 ] "
        "zero_data: true name: 'zero' } } ] } "
    )


def code(execute: str, extra: str = "") -> str:
    return f"""
import triton_python_backend_utils as pb

def answer(request):
    return pb.InferenceResponse([pb.Tensor("Y", pb.get_input_tensor_by_name(request, "X").as_numpy() + 0)])

class TritonPythonModel:
    {execute}
        return [answer(request) for request in requests]
    {extra}
"""


PLAIN = code("def execute(self, requests):")
ASYNC = code("async def execute(self, requests):")
PRELOADS = code("def execute(self, requests):", "@staticmethod\n    def preload(args): pass")
CALLS = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            inputs = [pb.get_input_tensor_by_name(request, "X")]
            call = pb.InferenceRequest(model_name="child", requested_output_names=["Y"], inputs=inputs)
            made.append(pb.InferenceResponse([pb.get_output_tensor_by_name(call.exec(), "Y")]))
        return made
"""
STREAMS = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb.get_input_tensor_by_name(request, "X").as_numpy() + 0
            sender.send(pb.InferenceResponse([pb.Tensor("Y", value)]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true } "
HERE = parameter("isolation", "none")
APART = parameter("isolation", "process")

# name -> (configuration, files)
MODELS: dict[str, tuple[str, dict[str, str | bytes]]] = {
    "identity": (IDENTITY, {}),
    "instances": (IDENTITY + TWO + parameter("execute_delay_ms", "1"), {}),
    "dynamic": (IDENTITY + DYNAMIC + WARM + TWO, {}),
    "cached": (IDENTITY + DYNAMIC + "response_cache { enable: true } ", {}),
    "direct": ("backend: 'sequence' " + INTS + sequences("direct { }"), {}),
    "oldest": ("backend: 'sequence' " + INTS + sequences("oldest { max_candidate_sequences: 4 }") + TWO, {}),
    "ensemble": ("platform: 'ensemble' " + IO + "ensemble_scheduling { step [ " + STEP % ("child", "X", "t") + ", "
                 + STEP % ("child", "t", "Y") + "] max_inflight_requests: 1 } ", {}),
    "onnx": (ONNX + IO + DYNAMIC + WARM, {"1/model.onnx": onnx_models.identity()}),
    "onnx_text": (ONNX + TEXTS, {"1/model.onnx": onnx_models.identity("BYTES")}),
    "onnx_module": (ONNX + IO + parameter("session_api", "python"), {"1/model.onnx": onnx_models.identity()}),
    "onnx_apart": (ONNX + IO + APART, {"1/model.onnx": onnx_models.identity()}),
    "kernel": ("backend: 'kernel' " + IO + KERNELS, {"1/model.cu": KERNEL}),
    "kernel_apart": ("backend: 'kernel' " + IO + KERNELS + APART, {"1/model.cu": KERNEL}),
    "python": (PYTHON + WARM + TWO, {"1/model.py": PLAIN}),
    "python_late": (PYTHON + parameter("EXECUTE_TIMEOUT_SECONDS", "600"), {"1/model.py": PLAIN}),
    "python_async": (PYTHON, {"1/model.py": ASYNC}),
    "python_calls": (PYTHON, {"1/model.py": CALLS}),
    "python_decoupled": (PYTHON + DECOUPLED, {"1/model.py": STREAMS}),
    "python_preloads": (PYTHON + TWO, {"1/model.py": PRELOADS}),
    "here": (PYTHON + HERE + WARM, {"1/model.py": PLAIN}),
    "here_async": (PYTHON + HERE, {"1/model.py": ASYNC}),
    "here_calls": (PYTHON + HERE, {"1/model.py": CALLS}),
    "here_decoupled": (PYTHON + HERE + DECOUPLED, {"1/model.py": STREAMS}),
}  # fmt: skip

# loads that fail after instances were made
FAILING: dict[str, tuple[str, dict[str, str | bytes]]] = {
    "fails_to_initialize": (PYTHON + TWO, {"1/model.py": code("def initialize(self, args): raise ValueError\n    def execute(self, requests):")}),
    "fails_to_warm_up": (PYTHON + WARM, {"1/model.py": code("def execute(self, requests):\n        raise ValueError")}),
    "fails_to_compare": (ONNX + INTS + TWO, {"1/model.onnx": onnx_models.identity()}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("let_go")
    write_model(repository, "child", IDENTITY)
    for name, (config, files) in MODELS.items():
        write_model(repository, name, config, files)
    for name, (config, files) in FAILING.items():
        write_model(repository, name, config, files)
    settings: dict[str, Any] = {
        "model_control_mode": "explicit",
        "cache_config": "local,size=1048576",
        "rate_limit": "execution_count",
    }
    with EmbeddedServer(repository, **settings) as running:
        yield running


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts(server: EmbeddedServer, name: str) -> dict[str, weakref.ref[Any]]:
    """What a model that serves is made of."""

    def look() -> dict[str, weakref.ref[Any]]:
        model = server.server.repository.lookup(name)
        found: dict[str, Any] = {"model": model, "pool": model.pool, "backend": model.backend}
        found["scheduler"] = model.scheduler
        found["inner scheduler"] = getattr(model.scheduler, "inner", model.scheduler)
        for instance in model.pool.instances:
            found[instance.name] = instance
            found[instance.name + "'s backend"] = instance.backend
        return {part: weakref.ref(thing) for part, thing in found.items()}

    return server.ask(look)


def use(server: EmbeddedServer, name: str) -> None:
    """Some requests: over HTTP, gRPC and a stream; those of sequences end none; some are refused."""
    config = MODELS[name][0]
    kind = next(k for k in ("INT32", "STRING", "FP32") if f"TYPE_{k} dims: [ 4 ]" in config)
    array = {
        "INT32": np.ones((1, 4), np.int32),
        "FP32": np.ones((1, 4), np.float32),
        "STRING": np.full((1, 4), b"text", object),
    }[kind]
    numbered: dict[str, Any] = (
        {"sequence_id": 7, "sequence_start": True} if "sequence_batching" in config else {}
    )
    for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
        with module.InferenceServerClient(address) as client:
            tensor = module.InferInput("X", list(array.shape), "BYTES" if kind == "STRING" else kind)
            tensor.set_data_from_numpy(array)
            if DECOUPLED in config:
                if module is grpcclient:
                    stream(client, name, [tensor])
                continue
            for _ in range(3):
                client.infer(name, [tensor], **numbered)
            with pytest.raises(InferenceServerException):
                client.infer(name, [tensor, tensor], **numbered)
            client.get_model_metadata(name)
            client.get_inference_statistics(name)


def stream(client: Any, name: str, inputs: list[Any]) -> None:
    done = threading.Event()
    client.start_stream(lambda result, error: done.set())
    client.async_stream_infer(name, inputs)
    assert done.wait(60)
    client.stop_stream()


def freed(held: dict[str, weakref.ref[Any]]) -> None:
    """Waits until none of it is there any more."""
    alive: list[str] = []

    def gone() -> bool:
        alive[:] = [part for part, thing in held.items() if thing() is not None]
        return not alive

    until(gone, lambda: f"reference counts free {alive}: {chain(held[alive[0]]())}")


def chain(thing: Any) -> list[str]:
    """Who refers to an object."""
    return [f"{type(r).__module__}.{type(r).__qualname__} {str(r)[:300]}" for r in gc.get_referrers(thing)]


@pytest.fixture
def asked(server: EmbeddedServer) -> Iterator[list[bool]]:
    """Whether cycles are to be collected, of each time that memory is given back; that is not done."""
    found: list[bool] = []
    withdrawal = server.server.repository.withdrawal
    before, withdrawal.give_back = withdrawal.give_back, found.append
    yield found
    withdrawal.give_back = before


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_unloaded_model_is_freed_by_reference_counts(
    server: EmbeddedServer, name: str, without_collector: None, asked: list[bool]
) -> None:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        client.load_model("child")
        client.load_model(name)
        use(server, name)
        held = parts(server, name)
        assert len(held) >= 5 and all(thing() is not None for thing in held.values())
        client.unload_model(name)
    freed(held)
    until(lambda: asked, "memory is given back")
    assert asked == [HERE in MODELS[name][0]], "only what a model's own code has left here is looked for"


def objects() -> Counter[str]:
    """How many objects there are of each class that a model is made of."""
    kinds = (ModelCore, PoolCore, InstanceCore, Scheduler, Backend, BackendInstance)
    return Counter(type(thing).__qualname__ for thing in gc.get_objects() if isinstance(thing, kinds))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_a_model_whose_load_fails_is_freed_by_reference_counts(
    server: EmbeddedServer, name: str, without_collector: None
) -> None:
    before = objects()
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        with pytest.raises(InferenceServerException):
            client.load_model(name)
    until(lambda: objects() <= before, lambda: f"what is left: {objects() - before}")
