"""A load and an unload leave nothing that only the collector could free, whatever the model is and however they end."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from neptrio.errors import TritonError
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.traced import ensemble

INCLUDED = "__device__ float twice(float x) { return 2 * x; }\n"
KERNEL = """
#include "twice.cuh"
extern "C" __global__ void both(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = twice(x[i]);
}
"""
TENSORS = (
    'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ] '
    'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]'
)
PYTHON = """
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
FAILS = "class TritonPythonModel:\n    def initialize(self, args):\n        raise RuntimeError('no')\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("models")
    extra = "dynamic_batching { } version_policy { all { } } model_warmup [ ]"
    write_model(repository, "identity", identity_config(extra=extra), versions=(1, 2))
    write_model(repository, "sequences", identity_config(extra="sequence_batching { oldest { } }"))
    write_model(repository, "single", identity_config(pairs=1))
    write_model(repository, "together", ensemble("single", "single"))
    write_model(repository, "python", f'backend: "python" {TENSORS}', {"1/model.py": PYTHON})
    write_model(repository, "fails", f'backend: "python" {TENSORS}', {"1/model.py": FAILS})
    write_model(repository, "wrong", identity_config() + " nonsense")
    launch = 'key: "kernels" value { string_value: "both<<<ceil_div(X.size, 128), 128>>>(X, Y, X.size)" }'
    kernel = f'backend: "kernel" {TENSORS.replace("-1", "4")} instance_group [ {{ kind: KIND_CPU }} ] parameters {{ {launch} }}'
    write_model(repository, "kernel", kernel, {"1/model.cu": KERNEL, "1/twice.cuh": INCLUDED})
    with EmbeddedServer(repository, model_control_mode="explicit") as made:
        made.run(made.server.settled)
        yield made


def ask(server: EmbeddedServer, verb: str, *args: Any) -> bool:
    """Whether it has succeeded. The error is not passed from thread to thread: trio would keep it in a cycle."""

    async def tried() -> bool:
        try:
            await getattr(server.server.repository, verb)(*args)
        except TritonError:
            return False
        return True

    return server.run(tried)


def cycle(server: EmbeddedServer, name: str) -> bool:
    """Loads and unloads a model; False if it could not be loaded."""
    loaded = ask(server, "load", name, {})
    if loaded:
        ask(server, "unload", name, True)
        repository = server.server.repository
        server.until(lambda: not any(r.retiring for r in repository.records.values()), "it is unloaded")
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["identity", "sequences", "together", "python", "kernel", "fails", "wrong", "unknown"]
)
def test_nothing_is_left_in_cycles(server: EmbeddedServer, name: str) -> None:
    assert cycle(server, name) is (name not in ("fails", "wrong", "unknown"))  # what is made once is made
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            cycle(server, name)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(one).__qualname__ for one in gc.garbage)
        assert not left
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
