"""The instance that runs a kernel model on one GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from neptrio.backends.kernel import nvrtc
from neptrio.backends.kernel.device import SETTLE_SECONDS, Device, call
from neptrio.backends.kernel.device_module import (
    binary_signature,
    find_function,
    load_module,
    parameter_sizes,
    read_code,
)
from neptrio.errors import InvalidArgument, Unavailable
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from neptrio.backends.kernel.backend import KernelBackend


PINNED_FROM = 65536  # bytes; smaller bodies are gathered by the host sooner than a page-locked block is found


class DeviceInstance(BackendInstance):
    """Executes on one GPU without the GIL; see cext/backends/kernel/cuda_pipeline.pyx."""

    native = True
    takes_device_memory = True
    in_advance = 2  # one is copied in and one copied out while one computes

    def __init__(self, backend: KernelBackend, ordinal: int) -> None:
        from neptrio.backends.kernel.cuda_batch import DeviceBuilder

        self._backend = backend
        self._ordinal = ordinal
        self._device: Device | None = None
        self._queue: Any = None
        self._module: Any = None
        self._signatures = dict(backend.signatures)
        self._order: dict[str, int] = {}
        self._limits: list[tuple[int, int]] = []
        spec = backend.spec
        host = backend.context.host  # None without a server, as in unit tests of a model
        self._builder: Any = DeviceBuilder(
            [t.name for t in spec.inputs],
            [t.optional for t in spec.inputs],
            spec.batching,
            ordinal,
            self,
            host.shared_memory.output_place if host is not None else None,
        )

    def initialize(self) -> None:
        device = Device.get(self._ordinal, self._backend.context.settings.pinned_memory_pool_byte_size)
        self._device = device
        try:
            with device.current():
                self._load(device)
        except BaseException:
            self.finalize()
            raise
        device.occupants.append(self)
        if device.pool.broken:  # another model broke it meanwhile
            failure = device.failure
            self.finalize()
            raise Unavailable(failure)

    def _load(self, device: Device) -> None:
        from neptrio.backends.kernel.cuda_queue import DeviceQueue

        backend = self._backend
        spec = backend.spec
        path = backend.code_path(device.capability)
        used = list(dict.fromkeys(launch.kernel for launch in spec.launches))
        if backend.source is not None and path == backend.path:
            compiled = nvrtc.compile_source(
                backend.source, backend.compile_options, device.architecture, backend.context.name, used
            )
            code, names = compiled.code, compiled.names
        else:
            code, names = read_code(path), {name: name for name in used}
        self._module = load_module(code, f"'{path.name}' of model '{backend.context.name}'")
        functions = [find_function(self._module, names[name], f"'{path.name}'") for name in used]
        for name, function in zip(used, functions, strict=True):
            self._check(name, function, path)
        spec.check(self._signatures, path.name)
        self._order = {name: i for i, name in enumerate(used)}
        self._limits = [self._limit(function, device) for function in functions]
        for launch in spec.launches:
            if launch.cluster and device.capability < (9, 0):
                raise InvalidArgument(
                    f"kernel '{launch.kernel}' of model '{backend.context.name}' is launched in clusters, which {device.name} "
                    f"({device.architecture}) has not; they need sm_90 or later"
                )
        cuda = backend.context.config.optimization.cuda
        self._queue = DeviceQueue(
            device.pool,
            device.pinned,
            [int(function) for function in functions],
            cuda.busy_wait_events,
            True,
            (device, self._module),
            backend.execute_seconds,
        )
        device.queues.append(self._queue)
        self._builder.use(self._queue)

    def _check(self, name: str, function: Any, path: Path) -> None:
        """Checks a compiled kernel against the source's signature; without a source one is made from the kernel."""
        sizes = parameter_sizes(function)
        known = self._signatures.get(name)
        if known is None:
            self._signatures[name] = binary_signature(self._backend.spec, name, sizes)
            return
        declared = [p.size for p in known.parameters]
        if sizes and sizes != declared:
            raise InvalidArgument(
                f"kernel '{name}' of '{path.name}' was compiled with parameters of {sizes} bytes, its declaration "
                f"says {declared}"
            )

    def _limit(self, function: Any, device: Device) -> tuple[int, int]:
        """(most threads per block, most bytes of dynamic shared memory) with which the kernel can be launched."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute
        threads = call(
            driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function),
            "reading a kernel's attributes",
        )
        static = call(
            driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
            "reading a kernel's attributes",
        )
        dynamic = max(device.shared_limit - int(static), 0)
        call(
            driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic
            ),
            "allowing dynamic shared memory",
        )
        return int(threads), dynamic

    def plan(self, shapes: list[tuple[int, ...] | None], batch: int) -> Any:
        """The plan for a batch. Raises InvalidArgument when this GPU cannot run it."""
        plan = self._backend.spec.plan(shapes, batch, self._order, self._signatures)
        names = list(self._order)
        for kernel, _, block, shared, arguments in plan.launches_as_text():
            threads, dynamic = self._limits[kernel]
            if block[0] * block[1] * block[2] > threads:
                raise InvalidArgument(
                    f"kernel '{names[kernel]}' can run with at most {threads} threads per block, got {block}"
                )
            if shared > dynamic:
                raise InvalidArgument(
                    f"kernel '{names[kernel]}': {shared} bytes of dynamic shared memory, this GPU has {dynamic}"
                )
            if arguments > 256:
                raise InvalidArgument(
                    f"kernel '{names[kernel]}' has {arguments} arguments, at most 256 are possible"
                )
        return plan

    def broke(self, name: str) -> None:
        """A batch met an error that ends the context. On the trio thread."""
        device, host = self._device, self._backend.context.host
        if device is not None and device.break_(name, self._backend.context.name) and host is not None:
            host.device_failed(device.failure)

    def device_broke(self, device: Device) -> None:
        """The context has broken, whoever broke it, so this instance can no longer serve."""
        self.healthy, self.lost = False, True
        self.reason = f"Unavailable: {device.failure}"
        self.on_health()

    def memory_changed(self) -> None:
        """The memory of a batch slot has grown. On the trio thread."""
        self.on_memory()

    def memory_usage(self) -> list[tuple[str, int, int]]:
        """The device and page-locked memory that this instance holds: (type, id, bytes)."""
        if self._queue is None:
            return []
        usage = self._queue.usage()
        return [("GPU", self._ordinal, usage["device_bytes"]), ("CPU_PINNED", 0, usage["pinned_bytes"])]

    def usage(self) -> dict[str, int]:
        """Counters: memory, graph launches, batches launched in advance."""
        return dict(self._queue.usage()) if self._queue is not None else {}

    def body_memory(self, size: int) -> Any:
        """Page-locked memory, from which the device fetches inputs without the host."""
        queue = self._queue
        return queue.pinned.lend(size) if queue is not None and size >= PINNED_FROM else None

    def prepare(self, batch: Batch) -> Batch:
        return self._builder.prepare(batch, batch.instance.mailbox)

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")

    def finalize(self) -> None:
        self._builder.use(None)
        device, self._device = self._device, None
        queue, self._queue = self._queue, None
        if device is None:
            return
        if queue is not None:
            queue.close()
            device.queues.remove(queue)
        if self in device.occupants:
            device.occupants.remove(self)
        if not device.pool.broken:
            device.later(partial(_give_back, device, self._module))
        self._module = None
        device.release()
        if not device.pool.broken:
            device.thread.settle(SETTLE_SECONDS)

    def let_go(self) -> None:
        super().let_go()
        self._builder = None  # which asks this instance for plans


def _give_back(device: Device, module: Any) -> None:
    """What an instance had, after its queue was closed."""
    if module is not None:
        with device.current():
            device._driver.cuModuleUnload(module)
    device.pool.free_pinned()
    device.pool.trim()
    device.pinned.drop()
