"""GPUs: contexts, memory pools, modules, and the instance that runs a kernel model on one.

Everything here happens at load, through cuda-python's Python API; what happens per batch is in
cext/cuda_launch.pyx. The package can be imported, and says so plainly, where there is no driver.

Ownership: a Device holds the primary context of a GPU (so that memory can be shared with other
libraries in the process), a memory pool and the pinned output pool. When a kernel breaks the
context (an illegal address, say), every kernel model on that GPU is out of service; the next load
on it resets the primary context and starts a new generation.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neptrio._cext.batch import Batch
from neptrio.backends.base import BackendInstance
from neptrio.backends.kernel import nvrtc
from neptrio.backends.kernel.signature import CType, Parameter, Signature
from neptrio.errors import Internal, InvalidArgument, Reason, TritonError

if TYPE_CHECKING:
    from neptrio.backends.kernel.backend import KernelBackend
    from neptrio.backends.kernel.config import ModelSpec

log = logging.getLogger("neptrio.kernel")

PINNED_LIMIT = 256 << 20  # bytes of pinned outputs per GPU, until a model's backend says otherwise
POOL_KEEPS = 64 << 20  # bytes the device pool keeps when nothing uses them; tritonserver's pool size


@functools.lru_cache(1)
def _count() -> tuple[int, str]:
    """(number of GPUs, why there are none)."""
    if importlib.util.find_spec("neptrio._cext.cuda_launch") is None:
        return 0, "this build has no CUDA part (cuda-python and cuda.h were missing at build time)"
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's library: quicker to miss than importing the package
    except OSError:
        return 0, "the NVIDIA driver (libcuda.so.1) is not installed"
    try:
        from cuda.bindings import driver

        (error,) = driver.cuInit(0)
        if error != driver.CUresult.CUDA_SUCCESS:
            return 0, f"cuInit: {error.name}"
        error, count = driver.cuDeviceGetCount()
        if error != driver.CUresult.CUDA_SUCCESS:
            return 0, f"cuDeviceGetCount: {error.name}"
    except Exception as error:  # no package or no driver: different types in every release
        return 0, f"{type(error).__name__}: {error}".strip()
    return int(count), "" if count else "the driver reports no device"


def count() -> int:
    """How many GPUs this process can use; 0 without a driver, a package or a device."""
    return _count()[0]


def why_none() -> str:
    """Why count() is 0."""
    return _count()[1]


def call(result: Any, doing: str) -> Any:
    """Unpacks a driver call's tuple. Raises Internal with the CUDA error's name."""
    error, *values = result
    if int(error):
        raise Internal(f"{error.name} while {doing}", reason=Reason.BACKEND)
    return values[0] if len(values) == 1 else tuple(values) if values else None


@dataclass
class DeviceStatistics:
    """What a GPU's pools hold, in bytes."""

    device: int
    name: str
    pool_reserved: int
    pool_used: int
    pinned_total: int
    pinned_used: int


class Device:
    """One GPU's context and pools, shared by the instances on it."""

    _open: dict[int, Device] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        from neptrio._cext.cuda_launch import PinnedPool

        self.ordinal = ordinal
        self.broken = ""
        self._driver = driver
        self.handle = call(driver.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
        raw = call(driver.cuDeviceGetName(128, self.handle), "reading the GPU's name")
        self.name = raw.split(b"\0")[0].decode()
        attribute = driver.CUdevice_attribute
        self.capability = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.shared_limit = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        if not self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED):
            raise InvalidArgument(
                f"GPU {ordinal} ({self.name}) has no memory pools, which kernel models need"
            )
        self.context = call(driver.cuDevicePrimaryCtxRetain(self.handle), "creating the context")
        call(driver.cuCtxSetCurrent(self.context), "making the context current")
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        self.pool = call(driver.cuMemPoolCreate(properties), "creating the memory pool")
        call(
            driver.cuMemPoolSetAttribute(
                self.pool,
                driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                driver.cuuint64_t(POOL_KEEPS),
            ),
            "setting up the memory pool",
        )
        self.pinned = PinnedPool(int(self.context), PINNED_LIMIT)

    def _attribute(self, which: Any) -> int:
        return int(call(self._driver.cuDeviceGetAttribute(which, self.handle), "reading a GPU attribute"))

    @property
    def architecture(self) -> str:
        """What NVRTC compiles for, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def statistics(self) -> DeviceStatistics:
        """Bytes in the pools."""
        attribute = self._driver.CUmemPool_attribute
        values = [
            int(call(self._driver.cuMemPoolGetAttribute(self.pool, a), "reading the memory pool"))
            for a in (
                attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            )
        ]
        return DeviceStatistics(
            self.ordinal, self.name, values[0], values[1], self.pinned.total, self.pinned.used
        )

    @classmethod
    def get(cls, ordinal: int, pinned_limit: int | None = None) -> Device:
        """The device, opened if need be; after a broken context a fresh one. Raises TritonError.

        `pinned_limit`: bytes of page-locked memory for outputs, at most, from now on.
        """
        if not 0 <= ordinal < count():
            have = f"there are {count()}" if count() else f"there is none ({why_none()})"
            raise InvalidArgument(f"GPU {ordinal} was asked for and {have}")
        with cls._lock:
            device = cls._open.get(ordinal)
            if device is not None and device.broken:
                log.warning("resetting GPU %d after %s", ordinal, device.broken)
                del cls._open[ordinal]
                driver = device._driver
                call(driver.cuDevicePrimaryCtxReset(device.handle), f"resetting GPU {ordinal}")
                device = None
            if device is None:
                device = cls._open[ordinal] = cls(ordinal)
            if pinned_limit is not None:
                device.pinned.limit = pinned_limit
            return device


def load_module(code: bytes, what: str) -> Any:
    """cuModuleLoadData on the current context."""
    from cuda.bindings import driver

    return call(driver.cuModuleLoadData(code), f"loading {what}")


def find_function(module: Any, name: str, what: str) -> Any:
    """A kernel by its name, or by the C++ name it was given. Raises InvalidArgument naming what is there."""
    from cuda.bindings import driver

    error, function = driver.cuModuleGetFunction(module, name.encode())
    if not int(error):
        return function
    names = []
    try:
        total = call(driver.cuModuleGetFunctionCount(module), "listing kernels")
        for candidate in call(driver.cuModuleEnumerateFunctions(total, module), "listing kernels"):
            mangled = call(driver.cuFuncGetName(candidate), "listing kernels").decode()
            names.append(mangled)
            if mangled.startswith(f"_Z{len(name)}{name}"):
                return candidate
    except (AttributeError, TritonError):
        pass
    raise InvalidArgument(
        f"{what} has no kernel '{name}' (it has: {', '.join(names) or 'none that can be listed'})"
    )


def parameter_sizes(function: Any) -> list[int]:
    """The sizes of a compiled kernel's parameters, from the driver."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        error, *values = driver.cuFuncGetParamInfo(function, len(sizes))
        if int(error):
            return sizes
        sizes.append(int(values[1]))


def binary_signature(spec: ModelSpec, name: str, sizes: list[int]) -> Signature:
    """A signature from compiled code: sizes only, so tensors need 8 bytes and scalars take the value's type."""
    launch = next(launch for launch in spec.launches if launch.kernel == name)
    parameters = []
    for i, size in enumerate(sizes):
        tensor = i < len(launch.arguments) and launch.arguments[i].tensor is not None
        if tensor and size == 8:
            parameters.append(Parameter(f"argument {i}, 8 bytes", CType("void", 0, "v"), True, False))
        elif size in (1, 2, 4, 8):
            parameters.append(
                Parameter(f"argument {i}, {size} bytes", CType(f"{size} bytes", size, "x"), False, False)
            )
        else:
            parameters.append(Parameter(f"argument {i}, {size} bytes", None, False, False))
    return Signature(name, 0, tuple(parameters), False)


class DeviceInstance(BackendInstance):
    """Executes on one GPU without the GIL; see cext/cuda_launch.pyx."""

    native = True

    def __init__(self, backend: KernelBackend, ordinal: int) -> None:
        from neptrio._cext.cuda_launch import DeviceBuilder

        self._backend = backend
        self._ordinal = ordinal
        self._device: Device | None = None
        self._queue: Any = None
        self._module: Any = None
        self._signatures = dict(backend.signatures)
        self._order: dict[str, int] = {}
        self._limits: list[tuple[int, int]] = []
        spec = backend.spec
        memory = getattr(backend.context.services, "shared_memory", None)
        self._builder = DeviceBuilder(
            [t.name for t in spec.inputs],
            [t.optional for t in spec.inputs],
            spec.batching,
            ordinal,
            self._plan,
            self._broke,
            memory.cuda.output_place if memory is not None else None,
        )

    def initialize(self) -> None:
        from cuda.bindings import driver

        from neptrio._cext.cuda_launch import DeviceQueue

        backend = self._backend
        spec = backend.spec
        device = Device.get(self._ordinal, backend.context.settings.pinned_memory_pool_byte_size)
        call(driver.cuCtxSetCurrent(device.context), "making the context current")
        path = backend.code_path(device.capability)
        used = list(dict.fromkeys(launch.kernel for launch in spec.launches))
        if backend.source is not None and path == backend.path:
            compiled = nvrtc.compile_source(
                backend.source, spec.compile_options, device.architecture, backend.context.name
            )
            code, names = compiled.code, compiled.names
        else:
            code, names = _code(path), {name: name for name in used}
        self._module = load_module(code, f"'{path.name}' of model '{backend.context.name}'")
        functions = [find_function(self._module, names[name], f"'{path.name}'") for name in used]
        for name, function in zip(used, functions, strict=True):
            self._check(name, function, path)
        spec.check(self._signatures, path.name)
        self._order = {name: i for i, name in enumerate(used)}
        self._limits = [self._limit(function, device) for function in functions]
        cuda = backend.context.config.optimization.cuda
        self._queue = DeviceQueue(
            int(device.context),
            int(device.pool),
            [int(function) for function in functions],
            device.pinned,
            cuda.busy_wait_events,
            True,
            (device, self._module),
        )
        self._device = device
        self._builder.use(self._queue)

    def _check(self, name: str, function: Any, path: Path) -> None:
        """The compiled function against the source's signature, or a signature made from it."""
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
        """(threads per block, dynamic shared memory) the function can be launched with."""
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

    def _plan(self, shapes: list[tuple[int, ...] | None], batch: int) -> Any:
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

    def _broke(self, model: Any, name: str) -> None:
        """On the trio thread: the context is gone, and with it every kernel model on this GPU."""
        if self._device is not None and not self._device.broken:
            self._device.broken = name
            log.error(
                "GPU %d: %s in model '%s'; reload the model to start afresh", self._ordinal, name, model.name
            )
        model.ready = False
        model.fault = f"Internal: {name} on GPU {self._ordinal}; reload the model"
        model.on_ready()

    def memory_usage(self) -> list[tuple[str, int, int]]:
        """Device and pinned bytes this instance holds, as (type, id, bytes)."""
        if self._queue is None:
            return []
        usage = self._queue.usage()
        return [("GPU", self._ordinal, usage["device_bytes"]), ("CPU_PINNED", 0, usage["pinned_bytes"])]

    def usage(self) -> dict[str, int]:
        """The queue's counters: memory, graph launches, batches staged ahead."""
        return dict(self._queue.usage()) if self._queue is not None else {}

    def prepare(self, batch: Batch) -> Batch:
        return self._builder.prepare(batch, batch.instance.mailbox)

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")

    def finalize(self) -> None:
        self._builder.use(None)
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._module is not None and self._device is not None and not self._device.broken:
            from cuda.bindings import driver

            driver.cuModuleUnload(self._module)
        self._module = None
        self._device = None


def _code(path: Path) -> bytes:
    """PTX is text and must end with a zero byte for the driver."""
    code = path.read_bytes()
    return code + b"\0" if path.suffix == ".ptx" else code
