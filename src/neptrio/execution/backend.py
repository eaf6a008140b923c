"""The backend interface.

A Backend belongs to one model version and is used from loader threads; its instances each live
on their own thread: initialize(), execute() and finalize() are called there and nowhere else.
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

READY_SECONDS = 5.0


class Abandonment:
    """Tells work on a loader thread that nobody waits for it any longer. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.abandoned = False

    def add(self, call: Callable[[], None]) -> None:
        """`call()` once the load is abandoned; at once if it is already."""
        with self._lock:
            if not self.abandoned:
                self._calls.append(call)
                return
        call()

    def now(self) -> None:
        """The load is abandoned."""
        with self._lock:
            self.abandoned = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class LoadSettings(Protocol):
    """What backends read of the server's settings (neptrio.settings.Settings)."""

    @property
    def backend_directory(self) -> Path | None: ...

    @property
    def metrics_config(self) -> Sequence[str]: ...

    @property
    def pinned_memory_pool_byte_size(self) -> int: ...

    def backend_settings(self, backend: str) -> dict[str, str]: ...


@dataclass(frozen=True)
class LoadContext:
    """What a backend may know when it loads a version."""

    name: str
    version: int
    model_dir: Path
    version_dir: Path
    config: Any  # inference.ModelConfig
    settings: LoadSettings
    host: ModelHost
    abandonment: Abandonment = field(default_factory=Abandonment)


class BackendInstance(ABC):
    """One instance of a model. `native` instances execute without the GIL."""

    native = False
    batch_type: type[Batch] = Batch  # what its batches are made as, before prepare()
    # batches that it works on at once; more than one only together with `overlapping`
    capacity = 1
    # begin() takes batches from the trio thread and posts each when it is done, in any order
    overlapping = False
    # overlapping, and works through several quick batches that lie ahead of it, one after the other
    deep = False
    expected_ns = 0.0  # what an execution takes, before the first is measured (native instances)
    # its thread waits for a request to another model: nothing more is prepared for it
    blocked = False
    # reads input tensors in device memory (GPU_MEMORY) where they lie; others get them fetched
    takes_device_memory = False
    # True when sequence_ended() is to be called: asked once, after initialize()
    wants_sequence_end = False

    ready_seconds = READY_SECONDS  # how long is_ready() may take

    # False while it cannot serve (its process is gone); on_health() tells the model, on the trio thread
    healthy = True
    reason = ""
    lost = False  # it will never recover: the next load makes the model anew

    def on_health(self) -> None:
        """`healthy` has changed; the model sets this."""

    def on_memory(self) -> None:
        """What Backend.memory_usage() tells has changed; the model sets this. On the trio thread."""

    def initialize(self) -> None:
        """Called once on the instance's thread before the first batch. May raise."""

    def abort(self) -> None:
        """The load was abandoned: initialize() is to end if that is possible. Any thread."""

    @abstractmethod
    def execute(self, batch: Batch) -> None:
        """Answers every request of the batch.

        Sets batch.responses[i] to an InferResponse (outputs or a TritonError of its own) for
        each request, and calls batch.mark_input_end() and batch.mark_output_start() at those
        points. Raising fails the whole batch. Runs on the instance's thread.
        """

    def begin(self, batch: Batch) -> None:
        """Overlapping instances: starts a batch without blocking. Called on the trio thread."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def prepare(self, batch: Batch) -> Batch:
        """Called on the trio thread before submission; native instances fill in their work."""
        return batch

    def describe_failure(self, error: BaseException) -> TritonError:
        """The error that clients see when execute() raised `error`."""
        return Internal(_failure_text(error), reason=Reason.BACKEND)

    def is_ready(self) -> bool:
        """True when the instance can serve. Called on a thread of its own, one call at a time; may raise.

        An answer that takes longer than ready_seconds counts as no to those who wait for it; the call goes on.
        """
        return True

    def process(self) -> tuple[int, int, int] | None:
        """(process id, restarts so far, what lies ahead of it) of an instance that is a process and runs, else None."""
        return None

    @property
    def ahead(self) -> int:
        """Batches that were begun and that it has not taken up yet."""
        return 0

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        """A sequence that this instance has worked on is over; its state can go.

        `reason` is "ended", "idle", "cancelled", "evicted" or "unloaded". Runs on the instance's
        thread, after the sequence's last request. What it raises is logged.
        """

    def finalize(self) -> None:
        """Called once on the instance's thread after the last batch."""


def _failure_text(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[-3:]))
    return f"{type(error).__name__}: {error}\n\nAt:\n{at}"


class Backend(ABC):
    """One loaded model version, from which instances are made."""

    # config.platform / metadata platform when the config leaves it empty
    platform = ""
    # config.default_model_filename when the config leaves it empty
    default_model_filename = ""
    # every instance is a process, which the start-up table says
    own_processes = False
    # instances of a group on the CPU whose count the config leaves open
    default_cpu_instances = 1

    def __init__(self, context: LoadContext) -> None:
        self.context = context

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Fills in what context.config leaves open (inputs, outputs, max_batch_size). May raise."""

    @classmethod
    def time_limit(cls, context: LoadContext) -> float | None:
        """Seconds that auto_complete(), load() and every initialize() may each take; None: the backend
        sees to that itself, or cannot hang. Raises InvalidArgument."""
        return None

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        """auto_complete() for a check: reads no weights and runs none of the model's code.

        False when inputs and outputs cannot be known that way. Raises TritonError.
        """
        return True

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        """For a check: tells what is wrong with a version, like load() but running and reading as
        little as complete_from_files(). The configuration is complete. May raise TritonError."""

    @classmethod
    def runs_on_gpu(cls) -> bool:
        """True when instances of KIND_AUTO should be on the GPUs this machine has."""
        return False

    def load(self) -> None:
        """Reads the model's files; called on a loader thread."""

    def regroup(self, config: Any) -> None:
        """Other instance groups are wanted, those of `config` (completed): prepares for what load()
        did not need for the present ones. Called on a loader thread while the model serves. May raise.
        """

    @abstractmethod
    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        """A new instance, not initialized yet. `kind` is "CPU", "GPU" or "MODEL"."""

    def memory_usage(self) -> list[tuple[str, int, int]]:
        """Memory that unload() will return, beyond the process's own: (type, id, bytes) with type
        "CPU_PINNED" or "GPU". Asked when every instance is initialized, and after each on_memory()."""
        return []

    def unload(self) -> None:
        """Drops what load() took; called after the last instance was finalized."""
