"""Instances of ONNX models on a GPU: tensors that lie on the device are bound where they lie, and outputs that are read
there stay there.

The problem: between two models on one GPU a tensor would go to the host and back, which costs more than most models. The
choice: a run in which any input or output lies on the device uses ONNX Runtime's IO binding; all other runs go the plain
way, and ONNX Runtime copies.

Rules:
 1. Inputs of several requests are put side by side on the device; what lies on another GPU passes through the host.
 2. An output is bound on the device when any request of the batch reads it there (device_outputs.stays()); those of the
    other requests are copied out afterwards.
 3. ONNX Runtime waits for the device before a run returns, so whoever reads an output next need not wait.
 4. An instance without our own CUDA part, with strings, or with a layout of its own takes tensors on the host only.
 5. ONNX Runtime shares the device's context with everybody else there. When it says that the context has ended, all of
    them leave service, as after such an error of a kernel model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import neptrio.request.device_memory as device_memory
from neptrio.backends import device_outputs
from neptrio.backends.kernel import device as devices
from neptrio.backends.onnx.instance import OnnxInstance
from neptrio.errors import TritonError, Unavailable
from neptrio.execution.batch import Batch
from neptrio.execution.gather import gather
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor, tensor_at

if TYPE_CHECKING:
    from neptrio.backends.kernel.device import Device

GPU = device_outputs.GPU
ALIGNMENT = 256  # bytes, that of cudaMalloc, on which kernels may rely


# how ONNX Runtime words an error of the driver: "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ..."
FAILURE = re.compile(r"CUDA failure (\d+)\b")


class Broke(WorkItem):
    """Carries the news that a device cannot be used any more to the trio thread."""

    def __init__(self, instance: DeviceInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def deliver(self) -> None:
        self._instance.broke(self._name)


class DeviceInstance(OnnxInstance):
    """One session on one."""

    _device: Device | None = None

    def initialize(self) -> None:
        super().initialize()
        if not devices.count():
            return
        device = self._device = devices.Device.get(self._device_id)
        self.takes_device_memory = self._layout is None and not self._session.strings
        device.occupants.append(self)
        if device.pool.broken:  # another model broke it meanwhile
            failure = device.failure
            self.finalize()
            raise Unavailable(failure)

    def finalize(self) -> None:
        super().finalize()
        device, self._device = self._device, None
        if device is not None:
            if self in device.occupants:
                device.occupants.remove(self)
            device.release()

    def device_broke(self, device: Device) -> None:
        """The context has broken, whoever broke it, so this instance can no longer serve."""
        self.healthy, self.lost = False, True
        self.reason = f"Unavailable: {device.failure}"
        self.on_health()

    def broke(self, name: str) -> None:
        """ONNX Runtime met an error that ends the context. On the trio thread."""
        device, host = self._device, self._context.host
        if device is not None and device.break_(name, self._context.name) and host is not None:
            host.device_failed(device.failure)

    def _call(
        self, names: list[str], tensors: list[Tensor], batch: Batch, kept: set[str] | None = None
    ) -> list[Tensor]:
        try:
            return super()._call(names, tensors, batch, kept)
        except TritonError as error:
            found = FAILURE.search(str(error))
            if found is not None and self._device is not None and self._device.pool.told(int(found[1])):
                batch.instance.mailbox.completions.post(Broke(self, self._device.pool.broken))
            raise

    def _run(self, requests: list[InferRequest], batch: Batch) -> list[InferResponse]:
        if not self.takes_device_memory:
            return super()._run(requests, batch)
        names = self._wanted(requests)
        kept = {name for name in names if any(device_outputs.stays(r, name) for r in requests)}
        tensors = [self._input(requests, t.name) for t in requests[0].inputs]
        answers: list[list[Tensor]] = [[] for _ in requests]
        for tensor in self._call(names, tensors, batch, kept):
            if tensor.memory_kind == GPU and any(_overlap(tensor, given) for given in tensors):
                tensor = self._copied(tensor)  # an input handed through belongs to its request
            for answer, part in zip(answers, self._split(tensor, requests), strict=True):
                answer.append(part)
        return [
            InferResponse(device_outputs.settle(request, outputs))
            for request, outputs in zip(requests, answers, strict=True)
        ]

    def _input(self, requests: list[InferRequest], name: str) -> Tensor:
        """An input of all requests as one tensor, on this device if any part of it is on one."""
        # _key() has put together requests with the same inputs
        parts = [tensor for request in requests for tensor in request.inputs if tensor.name == name]
        if not any(tensor.memory_kind == GPU for tensor in parts):
            found = gather(requests, name)
            assert found is not None
            return found
        if len(parts) > 1:
            return self._together(name, parts)
        if not self._is_here(parts[0]):
            return device_memory.on_host(parts[0])
        return parts[0] if parts[0].address % ALIGNMENT == 0 else self._copied(parts[0])

    def _is_here(self, tensor: Tensor) -> bool:
        return bool(tensor.memory_kind == GPU and tensor.memory_id == self._device_id)

    def _copied(self, tensor: Tensor) -> Tensor:
        return self._together(tensor.name, [tensor])

    def _together(self, name: str, parts: list[Tensor]) -> Tensor:
        """The parts one after the other in memory of this device (rule 1)."""
        assert self._device is not None
        pool = self._device.pool
        block = pool.block(sum(tensor.nbytes for tensor in parts))
        at = block.address
        for tensor in parts:
            if self._is_here(tensor):
                pool.copy(at, tensor.address, tensor.nbytes)
            else:
                pool.store(at, device_memory.on_host(tensor))
            at += tensor.nbytes
        first = parts[0]
        shape = first.shape if len(parts) == 1 else (sum(t.shape[0] for t in parts), *first.shape[1:])
        return tensor_at(
            name, first.dtype, shape, block.address, at - block.address, block, GPU, self._device_id
        )

    def _bound(self, names: list[str], tensors: list[Tensor], ready: Any, kept: set[str]) -> list[Tensor]:
        if not kept and not any(tensor.memory_kind == GPU for tensor in tensors):
            return super()._bound(names, tensors, ready, kept)
        results: list[Tensor] = self._session.run_bound(names, tensors, ready, self._device_id, kept)
        return results


def _overlap(output: Tensor, given: Tensor) -> bool:
    return bool(
        output.nbytes
        and given.memory_kind == GPU
        and given.memory_id == output.memory_id
        and given.address <= output.address < given.address + given.nbytes
    )
