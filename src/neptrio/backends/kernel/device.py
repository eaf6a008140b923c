"""The GPUs that this process uses: contexts, memory pools, and what happens when a context breaks.

The problem: a GPU's context is shared by all models, regions and tensors on it. It costs hundreds of megabytes while
it exists, and one illegal memory access of one kernel ends it for all. The choice: a Device holds the primary context
(so that memory can be shared with other libraries of the process), a memory pool and a pool of page-locked memory
for outputs, and counts its users.

Rules:
 1. The first user opens a device; after the last one it is given back, context and pools. Outputs that are still
    being sent, and tensors on their way to another model, count as users.
 2. When a kernel breaks the context, every instance on that GPU is told and leaves service, and every registered
    region there is lost. The Device makes no more driver calls and stays open, so that whoever asks for it later is
    told why it cannot be used: until the process ends.
 3. The primary context is never reset: torch, ONNX Runtime and others in the process use it too, and CUDA says that
    only a new process can use the device after such an error.
 4. break_() and users' callbacks run on the trio thread. Everything that calls the driver runs elsewhere: opening on
    the thread that loads, closing and giving memory back on the device's own thread (driver_thread.py).
 5. Some calls wait for everything on the device, whoever began it: freeing page-locked memory, unloading a module,
    closing a region. While a kernel hangs they never return, and the driver holds up other threads' calls meanwhile. So
    they are left to the device's thread (later()), which makes them when no instance hangs, or later, when there is
    more to give back or the device is closed.

What happens for each batch is in cext/backends/kernel/cuda_*.pyx. The module can be imported without a driver; its
functions then say that there is none.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trio.lowlevel import in_trio_run

import neptrio.request.device_memory as device_memory
from neptrio import process_parts
from neptrio.backends.kernel.driver_thread import DriverThread
from neptrio.config import accelerators
from neptrio.errors import Internal, InvalidArgument, Reason, Unavailable

log = logging.getLogger("neptrio.kernel")

PINNED_LIMIT = 256 << 20  # bytes of page-locked output memory per GPU unless a backend setting says otherwise
POOL_KEEPS = (
    2**64 - 1
)  # bytes that the memory pool keeps while unused: all, until a model goes or memory runs out
SETTLE_SECONDS = 10.0  # how long an unload waits for the device's thread
LATE = "CUDA_ERROR_LAUNCH_TIMEOUT"  # of a device that was given up because something hangs there
ALIVE_SECONDS = 1.0  # how long that waits for a sign that no kernel hangs


@functools.lru_cache(1)
def _count() -> tuple[int, str]:
    """(number of GPUs, reason why there are none or "")."""
    if importlib.util.find_spec("neptrio.backends.kernel.cuda_launch") is None:
        return 0, "this build has no CUDA part (cuda-bindings and cuda.h were missing at build time)"
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's library; trying it is quicker than importing the package
    except OSError:
        return 0, "the NVIDIA driver (libcuda.so.1) is not installed"
    accelerators.before_start()
    try:
        from cuda.bindings import driver

        (error,) = driver.cuInit(0)
        if error != driver.CUresult.CUDA_SUCCESS:
            return 0, f"cuInit: {error.name}"
        error, count = driver.cuDeviceGetCount()
        if error != driver.CUresult.CUDA_SUCCESS:
            return 0, f"cuDeviceGetCount: {error.name}"
    # the package or the driver is missing: the error's type depends on the release
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}".strip()
    return int(count), "" if count else "the driver reports no device"


def count() -> int:
    """How many GPUs this process can use; 0 without a driver, a package or a device."""
    return _count()[0]


def why_none() -> str:
    """The reason why count() is 0."""
    return _count()[1]


def call(result: Any, doing: str) -> Any:
    """The result of a driver call, which returns (error, result...). Raises Internal with the CUDA error's name."""
    error, *values = result
    if int(error):
        raise Internal(f"{error.name} while {doing}", reason=Reason.BACKEND)
    return values[0] if len(values) == 1 else tuple(values) if values else None


@contextmanager
def ignoring_captures() -> Iterator[None]:
    """For calls of the driver while another library of the process may record a graph (cuda_memory.enter)."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call(driver.cuThreadExchangeStreamCaptureMode(mode), "setting up the thread")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def architecture(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a device: since sm_90 with what only its own generation has (wgmma, setmaxnreg),
    because the code runs nowhere else."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class Occupant(Protocol):
    """An instance on a GPU."""

    def device_broke(self, device: Device) -> None:
        """Called on the trio thread when the device's context has broken."""


@dataclass(frozen=True)
class DeviceStatistics:
    """Bytes in a GPU's pools; `users` counts instances and regions."""

    device: int
    name: str
    pool_reserved: int
    pool_used: int
    pinned_total: int
    pinned_used: int
    users: int


@dataclass(frozen=True)
class MemoryInfo:
    """A GPU's memory as its driver counts it, of all processes together."""

    uuid: str
    total_bytes: int
    used_bytes: int


class Device:
    """One GPU's context and pools, shared by all its users. Use get() and release()."""

    _open: dict[int, Device] = process_parts.gpus
    _lock = threading.RLock()
    remedy = "the server must be started anew"

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self.ordinal = ordinal
        self.broken = ""
        self.users = 0
        self.occupants: list[Occupant] = []
        self._driver = driver
        self.handle = call(driver.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
        raw = call(driver.cuDeviceGetName(128, self.handle), "reading the GPU's name")
        self.name = raw.split(b"\0")[0].decode()
        bytes_ = call(driver.cuDeviceGetUuid(self.handle), "reading the GPU's id").bytes
        text = bytes(bytes_).hex()
        self.uuid = "-".join(["GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
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
        self.thread = DriverThread(f"gpu-{ordinal}")
        self.queues: list[Any] = []  # of what may have work under way here: progress() tells
        self._leavings: list[Callable[[], object]] = []
        self._pool: Any = None
        self._pool_bytes = (0, 0)  # reserved, used
        try:
            self._make_pools()
        except BaseException:
            if self._pool is not None:
                driver.cuMemPoolDestroy(self._pool)
            driver.cuDevicePrimaryCtxRelease(self.handle)
            self.thread.end()
            raise

    def _make_pools(self) -> None:
        from neptrio.backends.kernel.cuda_memory import DevicePool
        from neptrio.backends.kernel.cuda_pinned import PinnedPool

        driver = self._driver
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        with self.current():
            self._pool = call(driver.cuMemPoolCreate(properties), "creating the memory pool")
            call(
                driver.cuMemPoolSetAttribute(
                    self._pool,
                    driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                    driver.cuuint64_t(POOL_KEEPS),
                ),
                "setting up the memory pool",
            )
            self.pool = DevicePool(int(self.context), int(self._pool), self.ordinal)
        self.pool.post, self.pool.ask = self.thread.post, self.thread.ask
        self.pool.on_idle = self._idle
        self.pinned = PinnedPool(self.pool, PINNED_LIMIT)
        self.pinned.on_idle = self._idle

    def _attribute(self, which: Any) -> int:
        return int(call(self._driver.cuDeviceGetAttribute(which, self.handle), "reading a GPU attribute"))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current for a few calls on a thread that has another one or none."""
        with ignoring_captures():
            call(self._driver.cuCtxPushCurrent(self.context), "making the context current")
            try:
                yield
            finally:
                self._driver.cuCtxPopCurrent()

    @property
    def architecture(self) -> str:
        """The architecture to compile for, such as sm_90a."""
        return architecture(self.capability)

    def statistics(self) -> DeviceStatistics:
        """Bytes in the pools; zeros after the context has broken. On the trio thread, which must not ask the driver,
        the numbers of the last time that anybody asked; new ones are fetched for the next time."""
        if in_trio_run():
            self.thread.post(self._read_pool)
        else:
            self._read_pool()
        reserved, used = (0, 0) if self.pool.broken else self._pool_bytes
        return DeviceStatistics(
            self.ordinal, self.name, reserved, used, self.pinned.total, self.pinned.used, self.users
        )

    def _read_pool(self) -> None:
        attribute = self._driver.CUmemPool_attribute
        with self._lock:
            if self.pool.broken or self._open.get(self.ordinal) is not self:
                return  # it is closed
            reserved, used = (
                int(call(self._driver.cuMemPoolGetAttribute(self._pool, a), "reading the memory pool"))
                for a in (
                    attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                    attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                )
            )
        self._pool_bytes = (reserved, used)

    def memory_info(self) -> MemoryInfo | None:
        """The GPU's memory, None after the context has broken. Not on the trio thread."""
        if self.pool.broken:
            return None
        self._read_pool()
        with self.current():
            free, total = call(self._driver.cuMemGetInfo(), "reading the GPU's memory")
        return MemoryInfo(self.uuid, int(total), int(total) - int(free))

    # ---------------------------------------------------------------- users

    @classmethod
    def get(cls, ordinal: int, pinned_limit: int | None = None) -> Device:
        """Counts a new user of the device and opens it if needed. Not on the trio thread.

        `pinned_limit` sets the most bytes of page-locked memory for outputs. Raises InvalidArgument for a GPU that there
        is not, Unavailable for one whose context has broken (rule 2), and Internal when the driver refuses.
        """
        if not 0 <= ordinal < count():
            have = f"there are {count()}" if count() else f"there is none ({why_none()})"
            raise InvalidArgument(f"GPU {ordinal} was asked for and {have}")
        with cls._lock:
            device = cls._open.get(ordinal)
            if device is not None and device.pool.broken:
                raise Unavailable(device.failure)
            if device is None:
                with ignoring_captures():
                    device = cls(ordinal)
                cls._open[ordinal] = device
                device_memory.pools[ordinal] = device.pool
            else:
                device.look_again()
            device.users += 1
            if pinned_limit is not None:
                device.pinned.limit = pinned_limit
            return device

    def release(self) -> None:
        """Counts a user less. Any thread; what follows from it happens on the device's thread."""
        self.thread.post(self._released)

    def _released(self) -> None:
        with self._lock:
            self.users -= 1
        self._settle()

    def _idle(self) -> None:
        """A pool has nothing in use. Called where its last block died."""
        if self.users == 0:
            self.thread.post(self._settle)

    # ---------------------------------------------------------------- what may wait for the whole device

    def later(self, call: Callable[[], object]) -> None:
        """Has the device's thread make calls that give something back and may wait for all that runs on the device, as
        soon as nothing hangs there (rule 5). Any thread."""
        self._leavings.append(call)
        self.thread.post(self._clear)

    def look_again(self) -> None:
        """Something has ended that may have kept later() waiting. Any thread."""
        if self._leavings:
            self.thread.post(self._clear)

    def _clear(self) -> None:
        if not self._leavings or not self._alive():
            return
        calls, self._leavings = self._leavings, []
        for call in calls:
            if self.pool.broken:
                return
            try:
                call()
            except Exception:
                log.exception("%s: a call of the driver failed", self.thread.name)

    def _alive(self, seconds: float = ALIVE_SECONDS) -> bool:
        """Whether every queue has nothing under way, or has finished something since this was asked."""
        before = {queue: queue.progress() for queue in list(self.queues)}
        end = time.monotonic() + seconds
        while not self.pool.broken:
            for queue, (_, ended) in list(before.items()):
                under_way, last = queue.progress()
                if not under_way or last != ended:
                    del before[queue]
            if not before:
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return False

    def _settle(self) -> None:
        """Closes the device when it has no users left (rule 1). On the device's thread."""
        with self._lock, ignoring_captures():
            if self.pool.broken or self._open.get(self.ordinal) is not self:
                return
            if self.users or self.pool.blocks or self.pinned.used:
                return
            self.pool.close()
            if self.pool.broken:
                log.error("%s", self.failure)
                return
            self._clear()
            del self._open[self.ordinal]
            device_memory.pools.pop(self.ordinal, None)
            self.pinned.close()
            self._driver.cuMemPoolDestroy(self._pool)
            self._driver.cuDevicePrimaryCtxRelease(self.handle)
            self.thread.end()

    # ---------------------------------------------------------------- a broken context

    @property
    def failure(self) -> str:
        """Why the device cannot be used any more."""
        why = self.broken or self.pool.broken
        return f"GPU {self.ordinal} cannot be used any more after {why}; {self.remedy}"

    def break_(self, name: str, model: str) -> bool:
        """A batch of `model` met an error that ends the context. False if that was known. On the trio thread."""
        if self.broken:
            return False
        self.broken = f"{name} in model '{model}'"
        log.error("%s", self.failure)
        for occupant in list(self.occupants):
            occupant.device_broke(self)
        return True


def hangs() -> bool:
    """True when a device was given up because something hangs there: the driver may wait for that at the process's end."""
    return any(device.pool.broken == LATE for device in list(Device._open.values()))


def settle(seconds: float = SETTLE_SECONDS) -> None:
    """Waits until the devices' threads have given back what nobody uses any more. Not on the trio thread."""
    for device in list(Device._open.values()):
        if not device.pool.broken:
            device.thread.settle(seconds)


process_parts.settle.append(settle)
process_parts.hang.append(hangs)
