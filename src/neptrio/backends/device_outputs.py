"""Outputs that a model has left in a GPU's memory: which of them may stay there, and copies of the others on the host."""

from __future__ import annotations

from collections.abc import Iterable

import neptrio.request.device_memory as device_memory
from neptrio.request.infer_request import InferRequest, MemoryKind, Tensor

GPU = int(MemoryKind.GPU_MEMORY)


def settle(request: InferRequest, outputs: Iterable[Tensor]) -> list[Tensor]:
    """A response's outputs, where those that nothing reads on the device are copied to the host."""
    settled = []
    for tensor in outputs:
        if tensor.memory_kind == GPU and not stays(request, tensor.name):
            tensor = device_memory.on_host(tensor)
        settled.append(tensor)
    return settled


def stays(request: InferRequest, name: str) -> bool:
    """True when an output of this request is read on the device: by the next step, by its client's region, or as a
    state that no client sees."""
    model = request.model
    states = getattr(model, "state_outputs", None)
    if model is not None and states and name in states and name not in model.output_names:
        return True
    for asked in request.outputs or ():
        if asked.name == name:
            return bool(request.cache_key is None and (asked.keep_on_device or asked.shm_region is not None))
    return False
