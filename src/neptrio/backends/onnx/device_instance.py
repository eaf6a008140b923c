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
 6. A run that takes longer than EXECUTE_TIMEOUT_SECONDS is answered without it and its thread left behind (run_limit.py),
    and the device is given up. So are the runs of other models there.
 7. ONNX Runtime frees sessions and tensors on a thread of their own (releases.py). A release that takes as long gives up
    the device, too.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import neptrio.request.device_memory as device_memory
from neptrio.backends import device_outputs
from neptrio.backends.kernel import device as devices
from neptrio.backends.onnx.instance import OnnxInstance
from neptrio.backends.onnx.releases import WAIT_SECONDS, Release, Releases, keep
from neptrio.backends.onnx.run_limit import RunBatch, RunLimit
from neptrio.errors import Code, Internal, Reason, TritonError, Unavailable
from neptrio.execution.backend import LoadContext
from neptrio.execution.batch import Batch
from neptrio.execution.gather import gather
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor, monotonic_ns, tensor_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from neptrio.backends.kernel.device import Device
    from neptrio.loop.timers import Timers

GPU = device_outputs.GPU
LAUNCH_TIMEOUT = 702  # the driver's error for a kernel that takes too long
ALIGNMENT = 256  # bytes, that of cudaMalloc, on which kernels may rely


# how ONNX Runtime words an error of the driver: "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ..."
FAILURE = re.compile(r"CUDA failure (\d+)\b")


class Broke(WorkItem):
    """Carries the news that a device cannot be used any more to the trio thread."""

    def __init__(self, instance: DeviceInstance, device: Device) -> None:
        self._instance = instance
        self._device = device

    def deliver(self) -> None:
        self._instance.broke(self._device, self._device.pool.broken)


class Begun(WorkItem):
    """Carries the news that the release of a session has begun to the trio thread, which looks whether it ends."""

    def __init__(self, timers: Timers, when_ns: int, late: Callable[[], None]) -> None:
        self._timers, self._when_ns, self._late = timers, when_ns, late

    def deliver(self) -> None:
        self._timers.at(self._when_ns, self._late)


class DeviceInstance(OnnxInstance):
    """One session on one."""

    batch_type = RunBatch
    _device: Device | None = None

    def __init__(self, context: LoadContext, name: str, kind: str, device_id: int, seconds: float) -> None:
        """`seconds`: how long an execution may take."""
        super().__init__(context, name, kind, device_id)
        self._limit = RunLimit(seconds, self._late)
        self._overdue: TritonError | None = None  # what the batch that took too long is answered with
        self._failure = ""
        self._releases = Releases.of(device_id)

    def initialize(self) -> None:
        # before the session is made: on a device that was given up that might hang
        device = devices.Device.get(self._device_id) if devices.count() else None
        try:
            super().initialize()
        except BaseException:
            if device is not None:
                device.release()
            raise
        self.session.hold = self._releases.hold
        if device is None:
            return
        self._device = device
        self.takes_device_memory = self._layout is None and not self.session.strings
        device.occupants.append(self)
        device.queues.append(self._limit)
        self._releases.watch(device)
        if device.pool.broken:  # another model broke it meanwhile
            self._releases.given_up = True
            self.finalize()
            raise Unavailable(device.failure)

    def finalize(self) -> None:
        session, self.session = self.session, None
        device, self._device = self._device, None
        if device is not None:
            if self in device.occupants:
                device.occupants.remove(self)
            device.queues.remove(self._limit)
        if session is not None:
            begins, done = partial(self._release_begins, device), device.release if device else _nothing
            seconds = min(WAIT_SECONDS, self._limit.seconds)
            self._releases.release(session, self._name, device, seconds, begins, done)

    # ---------------------------------------------------------------- a device that cannot be used any more

    @property
    def hangs(self) -> bool:  # type: ignore[override]
        return self.lost and self._limit.running

    def prepare(self, batch: Batch) -> Batch:
        if self.lost:
            raise Unavailable(self._failure)
        host = self._context.host
        if host is not None:  # in a process of its own it is the server that looks
            self._limit.watch(batch.instance, host.timers)
        return batch

    def execute(self, batch: Batch) -> None:
        device = self._device
        if self.lost or (device is not None and device.pool.broken):
            raise Unavailable(device.failure if device is not None else self._failure)
        self._limit.begin(batch)
        try:
            super().execute(batch)
        finally:
            self._limit.end()
            if device is not None:
                if device.pool.broken and not device.broken:
                    batch.instance.mailbox.completions.post(Broke(self, device))
                device.look_again()

    def device_broke(self, device: Device) -> None:
        """The context has broken, whoever broke it, so this instance can no longer serve."""
        failure = Internal(f"model '{self._context.name}': {device.failure}", reason=Reason.BACKEND)
        self._lose(device.failure, failure)

    def broke(self, device: Device, name: str) -> None:
        """Something ended the context, or takes too long there. On the trio thread."""
        host = self._context.host
        if device.break_(name, self._context.name) and host is not None:
            host.device_failed(device.failure)

    def _late(self) -> None:
        name = f"no end of a run within {self._limit.seconds:g} s (EXECUTE_TIMEOUT_SECONDS)"
        error = TritonError(f"model '{self._context.name}': {name}", Code.TIMED_OUT, Reason.BACKEND)
        device = self._device
        if device is None:  # the server has no CUDA part of its own, so nobody else can be told
            self._lose(f"GPU {self._device_id} cannot be used any more after {name}", error)
            return
        self._overdue = error
        device.pool.give_up(LAUNCH_TIMEOUT)
        self.broke(device, name)

    def _lose(self, failure: str, error: TritonError) -> None:
        self.healthy, self.lost = False, True
        self._failure = failure
        self.reason = f"Unavailable: {failure}"
        self.on_health()
        if self._limit.running:
            self._releases.given_up = self._releases.hangs = True
            keep(self.session)
            self._limit.give_up(self._overdue or error, Unavailable(failure))

    def _release_begins(self, device: Device | None, release: Release) -> None:
        """On the releases' thread."""
        host = self._context.host
        if host is not None and device is not None:
            when_ns = monotonic_ns() + int(self._limit.seconds * 1e9)
            host.completions.post(Begun(host.timers, when_ns, partial(self._release_late, device, release)))

    def _release_late(self, device: Device, release: Release) -> None:
        if not release.ended.is_set():
            device.pool.give_up(LAUNCH_TIMEOUT)
            limit = f"{self._limit.seconds:g} s (EXECUTE_TIMEOUT_SECONDS)"
            self.broke(device, f"no end of the release of a session within {limit}")

    # ---------------------------------------------------------------- runs

    def _call(
        self, names: list[str], tensors: list[Tensor], batch: Batch, kept: set[str] | None = None
    ) -> list[Tensor]:
        try:
            return super()._call(names, tensors, batch, kept)
        except TritonError as error:
            found = FAILURE.search(str(error))
            if found is not None and self._device is not None:
                self._device.pool.told(int(found[1]))  # execute() looks what that means
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
        results: list[Tensor] = self.session.run_bound(names, tensors, ready, self._device_id, kept)
        return results


def _nothing() -> None:
    """Nobody is to be told."""


def _overlap(output: Tensor, given: Tensor) -> bool:
    return bool(
        output.nbytes
        and given.memory_kind == GPU
        and given.memory_id == output.memory_id
        and given.address <= output.address < given.address + given.nbytes
    )
