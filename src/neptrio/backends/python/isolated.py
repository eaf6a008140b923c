"""A Python model in a process of its own.

The problem: a model that crashes, leaks, blocks the GIL or needs other packages must not take the
server with it. The choice: one child process per instance, supervised from here. Batches, responses and calls to other
models cross on rings in shared memory (process_session.py), what is rare on a socket (isolated_host.py). docs/isolation.md describes
all of it.

Rules:
 1. When the child ends, everything that it was executing fails with the cause, the model is not ready at once, and a
    new child is started: at once where it had answered something, since a model that works may crash often and still be
    of use; else after a pause, which doubles each time up to MAX_PAUSE seconds.
 2. The reader thread notices that a process has ended, but the trio thread handles it: answers that the process wrote
    to its ring before it ended are still used.
 3. Batches that a process had not begun when it ended, and those that come after that, wait for the next process. If
    that does not start, they come back as not begun (ModelCore.take_back). Requests of a sequence fail at once, because its state ended with
    the process; so do those that were received into the memory that it could write to; and the first of those that
    MOST_FUTILE processes in a row have not begun, each of which ended before it began anything: it may be what ends them.
 4. The trio thread never writes to the socket: what it has to say there is posted to the writer thread.
 5. A model's initialize() has a time limit, after which the child is killed. Where instances initialize one after the other,
    it does not count while a child waits for the lock (initialize_lock.py).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from neptrio.backends.python.bls import OnLoop, refuse_circles
from neptrio.backends.python.execute_timeout import ExecuteTimeout
from neptrio.backends.python.initialize_lock import InitializeLock
from neptrio.backends.python.instance import ASYNC_CAPACITY
from neptrio.backends.python.isolated_host import IsolatedHost
from neptrio.backends.python.model_runner import ResponseDelivery
from neptrio.backends.python.process import Process
from neptrio.backends.python.process_session import PLAIN_LIBRARY, ProcessSession
from neptrio.backends.python.template import Template
from neptrio.errors import Internal, NotBegun, Reason, TritonError, Unsupported
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.loop import threads
from neptrio.observe.processes import allocated_bytes, held_bytes
from neptrio.request.infer_request import InferResponse, Tensor, monotonic_ns
from neptrio.rings.message import Violation
from neptrio.rings.ring import SUPPORTED

log = logging.getLogger("neptrio.python")

FIRST_PAUSE = 0.1
MAX_PAUSE = 30.0
MOST_FUTILE = 3
STEADY_SECONDS = 60.0  # after a child lived this long, the next pause is the first again
MOST_ANSWERS = 64  # that may wait unread; a correct process gives one per question
FINALIZE_SECONDS = 30.0
MEMORY_TYPES = ("GPU", "CPU_PINNED")
MOST_MEMORY_ROWS = 64


class IsolatedInstance(BackendInstance):
    """A backend instance whose model runs in a child process."""

    overlapping = True
    deep = True
    in_process = False
    in_order = (
        False  # it executes batches in the order in which they were sent, however many may be under way
    )
    most_under_way = 1  # how many may be, unless the model is asynchronous
    lent: Sequence[int] = ()  # descriptors that its backend shares with the process: Host.lent there

    def __init__(
        self,
        name: str,
        python: str | None,
        path: Path,
        args: dict[str, str],
        output_names: list[str],
        services: ModelHost,
        decoupled: bool,
        initialize_seconds: float,
        environ: dict[str, str],
        limits: dict[str, Any],
        execute_seconds: float | None,
        *,
        version: int,
        read_only: bool,
        origin: Template,
    ) -> None:
        if not SUPPORTED or (python is not None and not PLAIN_LIBRARY):
            raise Unsupported(
                f"'{name}' cannot have a process of its own: this system has no memory files that can be sealed, or no event "
                "descriptors. Where the model's parameter isolation is 'none', it runs in the server's process"
            )
        self.name = name
        self._version = version
        self._read_only = read_only
        self._origin = origin
        self._timeout = ExecuteTimeout(name, execute_seconds, self._first, services.timers)
        self.initialize_lock = (
            InitializeLock()
        )  # of this instance alone, unless its backend gives it the lock of the model
        self._environ = environ
        self._resources = limits
        self._python = python
        self._path = path
        self._args = args
        self._output_names = output_names
        self._services = services
        self._completions = services.completions
        self._decoupled = decoupled
        self._limit = initialize_seconds
        spans = services.spans
        self._spans = None if spans is None else {**asdict(spans), "attributes": spans.attributes()}
        self._host = IsolatedHost(name, args["model_name"], services)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._starting: Process | None = None
        self._taken_over = False  # finalize() closes the process that serves
        self._cause = "its process has not started"
        self._answers: queue.SimpleQueue[dict[str, Any] | float | None] = queue.SimpleQueue()
        self._asked: dict[int, Callable[[bool], None]] = {}
        # what the process holds besides ordinary memory: (type, id, bytes)
        self.memory_rows: list[tuple[str, int, int]] = []
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._started_at = 0.0
        self._restarts = 0
        self._pause = FIRST_PAUSE
        self._session: ProcessSession | None = None  # the process that serves; trio thread
        self._latest: ProcessSession | None = None  # the last process that was started
        self._between = False  # a process has ended and the next is starting
        self._waiting: list[Batch] = []  # batches for the next process, in order
        self._futile = 0  # processes in a row that were given batches and ended before they began one

    # ------------------------------------------------------------ start and end

    def initialize(self) -> None:
        self._incarnate()

    def _incarnate(self) -> None:
        answers: queue.SimpleQueue[dict[str, Any] | float | None] = queue.SimpleQueue()
        self._answers = answers
        process = Process(
            *(self.name, self._python, self._message, self._ended, self._environ, self._resources),
            origin=self._origin,
            unwanted=self._stopping.is_set,
        )
        self._starting = process
        session: ProcessSession | None = None
        try:
            if self._stopping.is_set():  # abort() was called
                raise Internal(f"the start of '{self.name}' was given up")
            session = self._latest = ProcessSession(self, process, self._services, self._decoupled)
            self._completions.post(OnLoop(session.register))  # initialize() may call other models
            process.send(
                {
                    "t": "initialize",
                    "name": self.name,
                    "path": str(self._path),
                    "folder": os.path.join(self._args["model_repository"], self._args["model_version"]),
                    "args": self._args,
                    "decoupled": self._decoupled,
                    "spans": self._spans,
                    "rings": {
                        **session.rings,
                        "model": self._args["model_name"],
                        "version": self._version,
                        "outputs": self._output_names,
                        "read_only": self._read_only,
                    },
                },
                [session.memory, session.bell, *self.lent],
            )
            answer = process.awaited(answers, "initialized", self._limit, "initialize")
        except BaseException:
            process.kill()
            process.close()
            if session is not None:  # the end of its process may have been noticed before it was there
                self._completions.post(OnLoop(partial(self._session_over, session)))
            raise
        finally:
            self._starting = None
            self.initialize_lock.release(process)
        with self._lock:
            self._process = process
            self._started_at = time.monotonic()
            self.healthy, self.returning, self.reason = True, False, ""
        self._completions.post(OnLoop(lambda: self._begins(session)))
        self.capacity = ASYNC_CAPACITY if answer.get("async") and not self.in_order else self.most_under_way
        self.wants_sequence_end = answer.get("sequence_end") is True
        self.exclusive = answer.get("exclusive") is True
        if process.ended.is_set():  # it died between its answer and here
            self._ended(process)

    def process(self) -> tuple[int, int, int, int, int] | None:
        process, session = self._process, self._session
        if process is None:
            return None
        copied, in_place = (0, 0) if session is None else (session.end.copied, session.end.in_place)
        return process.pid, self._restarts, self.ahead, copied, in_place

    def process_memory(self) -> int:
        process, session = self._process, self._session
        if process is None or session is None:
            return 0
        return held_bytes(process.pid) + allocated_bytes(session.memory)

    def abort(self) -> None:
        self._stopping.set()
        process = self._starting
        if process is not None:
            process.kill()
        self._origin.give_up()

    def _ended(self, process: Process) -> None:
        """Called when the child has ended (rule 1). Reader thread."""
        session = self._latest
        self._answers.put(None)
        with self._lock:
            serving = self._process is process
            # who closes it: the next one's supervisor, finalize() if it has taken it over, else this thread
            goes_on = not self._stopping.is_set()
            left_over = serving and not goes_on and not self._taken_over
            if serving:
                self._process = None
                self._cause = f"the model instance '{self.name}' failed: {process.cause}"
                self._host.forget()
                asked, self._asked = self._asked, {}
        if serving:
            if session is not None and session.process is process and session.end.answers:
                self._pause = 0.0
            elif time.monotonic() - self._started_at > STEADY_SECONDS:
                self._pause = FIRST_PAUSE
            self.returning = self._pause <= FIRST_PAUSE and goes_on
            self.healthy = False
            self.reason = self._cause
            if self.memory_rows:
                self.memory_rows = []
                self._completions.post(OnLoop(self.on_memory))
            if goes_on:
                self._completions.post(OnLoop(self.on_health))
                log.error(
                    "the model instance '%s' failed: %s", self.name, process.end
                )  # its output is in the log
            for answer in asked.values():
                answer(False)
            if goes_on:
                # only now: finalize() may wait for it at once
                self._supervisor = threads.start_surely(
                    self._restart, process, name=f"{self.name}-supervisor"
                )
        if session is not None and session.process is process:
            self._completions.post(OnLoop(lambda: self._session_over(session)))
        if left_over:
            process.close()

    def _failure(self, kind: type[Internal] = Internal) -> Internal:
        """The error of requests that the process, which has ended, does not answer."""
        error = kind(self._cause, reason=Reason.BACKEND)
        error.logged = True
        return error

    def _restart(self, old: Process) -> None:
        old.close()
        while not self._stopping.wait(self._pause):
            self._pause = min(max(self._pause * 2, FIRST_PAUSE), MAX_PAUSE)
            try:
                self._incarnate()
            except Exception as error:
                self._cause = f"the model instance '{self.name}' could not be restarted: {text_of(error)}"
                self.reason = self._cause
                self.returning = False
                self._completions.post(OnLoop(partial(self._give_up, text_of(error))))
                continue
            self._restarts += 1
            log.warning("%s runs again", self.name)
            self._completions.post(OnLoop(self.on_health))
            return
        self.returning = False
        self._completions.post(OnLoop(self._give_up))

    def finalize(self) -> None:
        self.abort()  # ends a restart, too
        process = self._take_over()
        if process is None:
            if self._supervisor is not None:
                self._supervisor.join(self._limit + 5)
            process = self._take_over()
            if process is None:
                return
        process.post_message({"t": "finalize"})
        session = self._latest
        if session is not None:
            self._completions.post(OnLoop(session.end.look_at_socket))
        try:
            process.awaited(self._answers, "finalized", FINALIZE_SECONDS, "finalize")
        except TritonError as error:
            log.error("%s", error)
            process.kill()
        process.close()

    def _take_over(self) -> Process | None:
        """The process that serves, which finalize() closes, even if it ends by itself from now on."""
        with self._lock:
            self._taken_over = self._process is not None
            return self._process

    def let_go(self) -> None:
        super().let_go()
        self._timeout.stop()
        session = self._latest
        if (
            session is not None and session.over
        ):  # that of a process which has just ended by itself may not be yet
            self._latest = None

    def is_ready(self) -> bool:
        process = self._process
        if process is None:
            return False
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        id = next(self._numbers)
        with self._lock:
            if self._process is not process:  # it has ended, so no answer would come
                return False
            self._asked[id] = answer.put
        process.send({"t": "is_ready", "k": id})
        return answer.get()  # the process's answer, or False from its end

    # ------------------------------------------------------------ execution

    def execute(self, batch: Batch) -> None:
        raise AssertionError("overlapping instances are given batches through begin()")

    def describe_failure(self, error: BaseException) -> TritonError:
        return error if isinstance(error, TritonError) else Internal(text_of(error), reason=Reason.BACKEND)

    def begin(self, batch: Batch) -> None:
        session = self._session
        if (session is None or session.end.closed) and self._between:
            self._waiting.append(batch)
        elif session is None or session.end.closed:
            error = self._failure(NotBegun)
            self._fail(batch, error)
            # sequences that it would have begun; not at once, since their scheduler is giving out batches
            self._completions.post(OnLoop(partial(self.on_state_lost, error)))
        else:
            session.end.begin(batch)
            self._timeout.watch(1 if self.in_order else self.capacity)

    def _first(self) -> tuple[Batch, int, Process] | None:
        session = self._session
        found = None if session is None else session.end.oldest
        return None if found is None or session is None else (*found, session.process)

    @property
    def ahead(self) -> int:
        session = self._session
        return 0 if session is None else int(session.end.occupancy)

    def body_memory(self, size: int) -> Any:
        session = self._session
        return None if session is None else session.end.body_memory(size)

    @property
    def body_bytes(self) -> int:
        session = self._session
        return 0 if session is None else session.end.body_bytes

    def holds_body(self, tensor: Tensor) -> bool:
        session = self._session
        return session is not None and session.end.holds_body(tensor)

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        session = self._session
        if session is not None:
            session.end.sequence_ended(sequence_id, reason)

    def _fail(self, batch: Batch, error: TritonError) -> None:
        batch.error = error
        if isinstance(error, NotBegun):
            batch.count_execution = False
        batch.compute_start = batch.compute_start or monotonic_ns()
        batch.compute_end = monotonic_ns()
        self._completions.post(batch)

    # ------------------------------------------------------------ the rings of its processes; trio thread

    def _begins(self, session: ProcessSession) -> None:
        """Lets a started process serve, beginning with the batches that wait for it. Trio thread."""
        if session.over:  # it has ended already
            return
        session.register()
        self._session = session
        self._between = False
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            try:
                self.begin(batch)
            except Exception as refused:
                self._fail(batch, self.describe_failure(refused))

    def _give_up(self, why: str | None = None) -> None:
        """The next process could not be started: why, None where none is wanted any more. Trio thread."""
        self._between = False
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._fail(batch, self._failure(NotBegun))
        self.on_state_lost(self._failure())
        self.on_health()
        refuse_circles()
        if why is not None:  # last: whoever reads it finds the model as it says
            log.error("restart of %s failed: %s", self.name, why)

    def _session_over(self, session: ProcessSession) -> None:
        """Handles the end of a process: uses what it had answered, and fails the rest (rules 2, 3). Trio thread."""
        if session.over:
            return
        session.drain_all()
        if self._session is session:
            self._session = None
            self._between = not self._stopping.is_set()
        untouched = session.end.untouched(self.capacity == 1) if self._between else []
        batches, requests = session.end.end()
        session.close()
        futile = bool(untouched) and len(untouched) == len(batches) and not (requests or session.end.answers)
        self._futile = self._futile + 1 if futile else 0
        if self._futile == MOST_FUTILE:
            self._futile = 0
            del untouched[0]
        error = self._failure()
        late, self._timeout.late = self._timeout.late, None
        for batch in batches:
            if batch in untouched and not self._bound_to(session, batch):
                self._waiting.append(batch)
            else:
                self._fail(batch, self._timeout.error() if batch is late else error)
        for request in requests:
            self._completions.post(ResponseDelivery(request, InferResponse(None, error), True, None))
        for call in list(session.calls.values()):
            call.drop()
        self.on_state_lost(error)

    def _bound_to(self, session: ProcessSession, batch: Batch) -> bool:
        """Whether a batch cannot be given to the next process: the state of its sequence is gone, or its bytes lie
        where the process that has ended, who knows why, may have written."""
        return any(request.sequence_id for request in batch.requests) or session.end.received_here(batch)

    # ------------------------------------------------------------ messages of the child

    def _message(self, process: Process, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "message_segment":
            session = self._latest
            if session is not None and session.process is process:
                session.segment_came(message)
        elif kind == "is_ready":
            answer = self._asked.pop(message["k"], None)
            if answer is not None:
                answer(bool(message["ready"]))
        elif kind == "ask" and message["op"] == "initialize lock":
            self._lock_asked(process, message["k"])
        elif kind == "memory":
            self._memory_told(process, message["rows"])
        elif not self._host.message(process, message):
            if self._answers.qsize() >= MOST_ANSWERS:
                raise Violation("answers to what nobody asked")
            self._answers.put(message)

    def _lock_asked(self, process: Process, key: int) -> None:
        if self._starting is not process:
            raise Violation("that it wants the lock of initialize(), which it has done")
        answers = self._answers
        answers.put(math.inf)  # the time left

        def begin() -> None:
            answers.put(self._limit)
            process.post_message({"t": "reply", "k": key, "value": None, "failure": None})

        self.initialize_lock.acquire(process, begin)

    def _memory_told(self, process: Process, rows: Any) -> None:
        if not isinstance(rows, list) or len(rows) > MOST_MEMORY_ROWS:
            raise Violation("memory that is no list")
        told = [(str(kind), int(number), int(size)) for kind, number, size in rows]
        if any(
            kind not in MEMORY_TYPES or not (0 <= n < 1024 and 0 <= size < 1 << 62) for kind, n, size in told
        ):
            raise Violation("memory that there is not")
        self.memory_rows = told
        self._completions.post(OnLoop(self.on_memory))
