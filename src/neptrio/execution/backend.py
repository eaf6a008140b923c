"""The backend interface.

A Backend belongs to one model version and is used from loader threads. Each of its instances has a thread of
its own: initialize(), execute() and finalize() are called there and nowhere else.
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from neptrio.errors import Internal, Reason, TritonError
from neptrio.execution.batch import Batch
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import summary, valid
from neptrio.request.infer_request import Tensor

READY_SECONDS = 5.0


class Abandonment:
    """Tells work on a loader thread that its load was abandoned: nobody waits for it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.abandoned = False

    def add(self, call: Callable[[], None]) -> None:
        """Calls `call()` when the load is abandoned, or now if it already is."""
        with self._lock:
            if not self.abandoned:
                self._calls.append(call)
                return
        call()

    def now(self) -> None:
        """Abandons the load: makes all calls that add() noted."""
        with self._lock:
            self.abandoned = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class LoadSettings(Protocol):
    """The part of the server's settings that backends read (neptrio.settings.Settings)."""

    @property
    def backend_directory(self) -> Path | None: ...

    @property
    def metrics_config(self) -> Sequence[str]: ...

    @property
    def pinned_memory_pool_byte_size(self) -> int: ...

    @property
    def max_output_bytes(self) -> int: ...

    @property
    def host_memory_budget(self) -> int: ...

    @property
    def model_cache_directory(self) -> Path | None: ...

    def backend_settings(self, backend: str) -> dict[str, str]: ...


@dataclass(frozen=True)
class LoadContext:
    """What a backend is told when it loads a model version."""

    name: str
    version: int
    model_dir: Path
    version_dir: Path
    config: Any  # inference.ModelConfig
    settings: LoadSettings
    host: ModelHost
    abandonment: Abandonment = field(default_factory=Abandonment)


class InstanceListener(Protocol):
    """Who hears of an instance's changes: the model. All are called on the trio thread."""

    def health_changed(self) -> None: ...

    def state_lost(self, backend: BackendInstance, error: TritonError) -> None: ...

    def memory_changed(self) -> None: ...

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None: ...


class BackendInstance(ABC):
    """One instance of a model. An instance with `native` executes without the GIL."""

    native = False
    batch_type: type[Batch] = Batch  # the class of its batches; prepare() gets one
    # so many batches may be handed to it while it executes one, where its model has more to do than one at a time
    in_advance = 1
    # how many batches it works on at once; more than one needs `overlapping`
    capacity = 1
    # begin() is called on the trio thread instead of execute(); it posts each batch when done, in any order
    overlapping = False
    # an overlapping instance that executes batches one after the other: short ones may be queued for it in advance
    deep = False
    expected_ns = 0.0  # assumed nanoseconds of an execution before one was measured (native instances)
    # its thread waits for a request to another model, so no batch is prepared for it in advance
    blocked = False
    # the model's code runs in the server's process, so its inputs are to lie in memory that no other process can write to
    in_process = True
    # reads inputs in device memory (GPU_MEMORY) in place; for others they are copied to the host
    takes_device_memory = False
    # of the instances of its model that say so, one at a time executes on a device; read once, after initialize()
    exclusive = False
    # True to have sequence_ended() called; read once, after initialize()
    wants_sequence_end = False

    ready_seconds = READY_SECONDS  # how long is_ready() may take

    # False while it cannot serve (its process is gone). After a change on_health() is called on the trio thread.
    healthy = True
    # it is not healthy, and its next process is being started: batches wait for it. False again when that fails
    returning = False
    reason = ""
    lost = False  # it will not recover: the next load replaces the model
    # its thread does not return from execute(), and its batch was answered without it: nobody waits for the thread, and
    # finalize() is not called
    hangs = False

    _hears: InstanceListener | None = None

    def tell(self, listener: InstanceListener) -> None:
        """Sets who hears of changes."""
        self._hears = listener

    def on_health(self) -> None:
        """To be called on the trio thread after `healthy` or `returning` has changed."""
        if self._hears is not None:
            self._hears.health_changed()

    def on_state_lost(self, error: TritonError) -> None:
        """To be called on the trio thread when what the model has kept in its process is gone, for that reason."""
        if self._hears is not None:
            self._hears.state_lost(self, error)

    def on_memory(self) -> None:
        """To be called on the trio thread after Backend.memory_usage() has changed."""
        if self._hears is not None:
            self._hears.memory_changed()

    def on_response(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        """To be called on the trio thread with the durations of a response that the backend has measured itself, which is the
        `place`th of its request; see ModelCounters.measured()."""
        if self._hears is not None:
            self._hears.response_measured(place, outcome, computing_ns, output_ns)

    def initialize(self) -> None:
        """Called once on the instance's thread before the first batch. May raise."""

    def abort(self) -> None:
        """The load was abandoned: initialize() should stop early if it can. Any thread."""

    @abstractmethod
    def execute(self, batch: Batch) -> None:
        """Answers every request of the batch.

        Sets batch.responses[i] to an InferResponse (with outputs or an error) for each request. Calls
        batch.mark_input_end() when the inputs are ready and batch.mark_output_start() when the computation is
        done. Raising fails the whole batch. Runs on the instance's thread.
        """

    def begin(self, batch: Batch) -> None:
        """Starts a batch without blocking (overlapping instances). Called on the trio thread.

        When it raises, the batch fails with that error; the backend must have forgotten it by then.
        """
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def prepare(self, batch: Batch) -> Batch:
        """Called on the trio thread before a batch is executed; native instances describe their work in it here."""
        return batch

    def describe_failure(self, error: BaseException) -> TritonError:
        """The error that clients get when execute() raised `error`."""
        return Internal(_failure_text(error), reason=Reason.BACKEND)

    def is_ready(self) -> bool:
        """True when the instance can serve. Called on a thread of its own, one call at a time; may raise.

        Raising counts as no. So does taking longer than ready_seconds, for those who wait; the call itself goes on.
        """
        return True

    def process(self) -> tuple[int, int, int, int, int] | None:
        """What is known of an instance's running process, None where there is none.

        (process id, restarts so far, batches queued for it, bytes of tensors that were copied on their way to it and
        back, bytes that were not).
        """
        return None

    def process_memory(self) -> int:
        """Bytes that the instance's own process and what it shares with the server hold now; 0 where it has none. Takes
        milliseconds; called on any thread once the instance is initialized."""
        return 0

    def body_memory(self, size: int) -> Any:
        """A writable buffer of `size` bytes into which a request for this instance can be received; None if there is
        none. Others may change what lies there until the request is answered, so it is for elements of numbers only.
        Called on the trio thread."""
        return None

    @property
    def body_bytes(self) -> int:
        """Bytes of what body_memory() has given and somebody uses."""
        return 0

    def holds_body(self, tensor: Tensor) -> bool:
        """True when the tensor lies in what body_memory() has given."""
        return False

    @property
    def ahead(self) -> int:
        """Batches that begin() has accepted and whose execution has not started."""
        return 0

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        """A sequence that this instance has worked on is over; its state can be dropped.

        `reason` is "ended", "idle", "cancelled", "evicted" or "unloaded". Runs on the instance's
        thread, after the sequence's last request. What it raises is logged.
        """

    def finalize(self) -> None:
        """Called once on the instance's thread after the last batch."""

    def let_go(self) -> None:
        """Called on the trio thread when nobody uses it any more, finalized or never initialized: drops what refers back
        to it, so that reference counts free it."""
        self._hears = None


def _failure_text(error: BaseException) -> str:
    try:
        frames = traceback.extract_tb(error.__traceback__)
        at = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[-3:]))
    except BaseException:  # its class says what its traceback is
        return summary(error)
    return f"{summary(error)}\n\nAt:\n{valid(at)}"


class Backend(ABC):
    """One loaded model version, from which instances are made."""

    # config.platform, and the metadata's platform, when the configuration leaves it empty
    platform = ""
    # config.default_model_filename when the config leaves it empty
    default_model_filename = ""
    # every instance is a process of its own; the start-up text says so
    own_processes = False
    # a model's own Python code runs in the server's process; what such code leaves only a full collection may free
    runs_code_here = False
    # instances of a CPU instance group whose count the configuration leaves open
    default_cpu_instances = 1

    def __init__(self, context: LoadContext) -> None:
        self.context = context

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Fills in what context.config leaves open: inputs, outputs, max_batch_size. May raise."""

    @classmethod
    def time_limit(cls, context: LoadContext) -> float | None:
        """Seconds that auto_complete(), load() and each initialize() may take. None: the backend enforces a limit
        itself, or cannot hang. Raises InvalidArgument."""
        return None

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        """auto_complete() for `neptrio check`: must not read weights or run the model's code.

        Returns False when inputs and outputs cannot be known that way. Raises TritonError.
        """
        return True

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        """Reports what is wrong with a version, for `neptrio check`: load() with the restrictions of
        complete_from_files(). The configuration is complete. May raise TritonError."""

    @classmethod
    def runs_on_gpu(cls) -> bool:
        """True when instances of KIND_AUTO run on this machine's GPUs, if it has any."""
        return False

    def load(self) -> None:
        """Reads the model's files. Called on a loader thread."""

    def regroup(self, config: Any) -> None:
        """The instance groups change to those of `config` (completed): prepares what they need beyond load().

        Called on a loader thread while the model serves. May raise.
        """

    @abstractmethod
    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        """A new instance, not initialized yet. `kind` is "CPU", "GPU" or "MODEL"."""

    def memory_usage(self) -> list[tuple[str, int, int]]:
        """Memory that unload() will give back: (type, id, bytes) with type "CPU_PINNED" or "GPU". Ordinary process
        memory is not listed. Called when all instances are initialized and after each on_memory()."""
        return []

    def unload(self) -> None:
        """Releases what load() took. Called after the last instance was finalized."""
