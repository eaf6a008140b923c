"""A Python model in a process of its own.

The problem: a model that crashes, leaks, blocks the GIL or needs other packages must not take the
server with it. The choice: one child process per instance, supervised from here; requests and
responses cross as described in triton_python_backend_utils._process.wire.

Rules:
 1. When the child ends, everything that it was executing fails with the cause, the model is not ready at once, and a
    new child is started after a pause, which doubles each time up to MAX_PAUSE seconds.
 2. Batches and requests that were sent are kept in a table. Only the code that removes one from the table answers it,
    so each is answered once. When the child ends, all are removed.
 3. The trio thread never writes to the socket: begin() and acknowledgements are posted to the writer thread.
 4. A model's initialize() has a time limit, after which the child is killed.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neptrio.backends.python.bls import OnLoop
from neptrio.backends.python.convert import CODES, known, wanted_names
from neptrio.backends.python.execute_timeout import ExecuteTimeout
from neptrio.backends.python.instance import ASYNC_CAPACITY
from neptrio.backends.python.isolated_host import IsolatedHost, received, row_of
from neptrio.backends.python.model_runner import Post, Reschedule, dropped
from neptrio.backends.python.process import Process
from neptrio.errors import Internal, Reason, TritonError
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of, valid
from neptrio.loop import threads
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    monotonic_ns,
)
from neptrio.rings.message import Violation

log = logging.getLogger("neptrio.python")

FIRST_PAUSE = 0.1
MAX_PAUSE = 30.0
STEADY_SECONDS = 60.0  # after a child lived this long, the next pause is the first again
MOST_ANSWERS = 64  # that may wait unread; a correct process gives one per question
FINALIZE_SECONDS = 30.0
MEMORY_TYPES = ("GPU", "CPU_PINNED")
MOST_MEMORY_ROWS = 64


class IsolatedInstance(BackendInstance):
    """A backend instance whose model runs in a child process; requests cross on a socket."""

    overlapping = True
    in_process = False
    in_order = (
        False  # it executes batches in the order in which they were sent, however many may be under way
    )
    most_under_way = 1  # how many may be, unless the model is asynchronous

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
        environ: dict[str, str] | None = None,
        limits: dict[str, Any] | None = None,
        execute_seconds: float | None = None,
    ) -> None:
        self.name = name
        self._timeout = ExecuteTimeout(name, execute_seconds, self._first, services.timers)
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
        self._cause = "its process has not started"
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._batches: dict[int, tuple[Batch, list[int]]] = {}
        self._requests: dict[int, InferRequest] = {}
        self._asked: dict[int, Callable[[bool], None]] = {}
        # what the process holds besides ordinary memory: (type, id, bytes)
        self.memory_rows: list[tuple[str, int, int]] = []
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._started_at = 0.0
        self._restarts = 0
        self._pause = FIRST_PAUSE

    # ------------------------------------------------------------ life

    def initialize(self) -> None:
        self._incarnate()

    def _incarnate(self) -> None:
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answers = answers
        process = self._spawn()
        self._starting = process
        try:
            if self._stopping.is_set():  # abort() was called
                raise Internal(f"the start of '{self.name}' was given up")
            self._send_initialize(
                process,
                {
                    "t": "initialize",
                    "name": self.name,
                    "path": str(self._path),
                    "args": self._args,
                    "decoupled": self._decoupled,
                    "spans": self._spans,
                },
            )
            answer = process.awaited(answers, "initialized", self._limit, "initialize")
        except BaseException:
            process.kill()
            process.close()
            raise
        finally:
            self._starting = None
        with self._lock:
            self._process = process
            self._started_at = time.monotonic()
        self._started(process)
        self.capacity = ASYNC_CAPACITY if answer["async"] and not self.in_order else self.most_under_way
        self.wants_sequence_end = answer["sequence_end"]
        self.healthy = not process.ended.is_set()
        self.reason = ""
        if not self.healthy:  # it died between its answer and here
            self._ended(process)

    # ring_instance.py overrides these methods

    def _spawn(self) -> Process:
        return Process(
            *(self.name, self._python, self._message, self._ended),
            environ=self._environ,
            limits=self._resources,
        )

    def _send_initialize(self, process: Process, message: dict[str, Any]) -> None:
        process.send(message, [])

    def _started(self, process: Process) -> None:
        """Called when the model's initialize() has returned, before batches come."""

    def _not_restarted(self) -> None:
        """Called when a restart failed; it may be tried again later."""

    def _send_finalize(self, process: Process) -> None:
        process.post_message({"t": "finalize"})

    def process(self) -> tuple[int, int, int, int, int] | None:
        process = self._process
        return None if process is None else (process.pid, self._restarts, self.ahead, *self._bytes())

    def _bytes(self) -> tuple[int, int]:
        """Bytes of tensors that were copied between the server and the process, and that were not."""
        return 0, 0

    def abort(self) -> None:
        self._stopping.set()
        process = self._starting
        if process is not None:
            process.kill()

    def _ended(self, process: Process) -> None:
        """Called when the child has ended (rule 1). Reader thread."""
        self._answers.put(None)
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            self._cause = f"the model instance '{self.name}' failed: {process.cause}"
            batches, self._batches = self._batches, {}
            requests, self._requests = self._requests, {}
            calls = self._host.take()
            asked, self._asked = self._asked, {}
        self.healthy = False
        self.reason = self._cause
        if self.memory_rows:
            self.memory_rows = []
            self._completions.post(OnLoop(self.on_memory))
        if not self._stopping.is_set():
            self._completions.post(OnLoop(self.on_health))
            log.error("%s", self._cause)
        error = Internal(self._cause, reason=Reason.BACKEND)
        for batch, ids in batches.values():
            for id in ids:
                requests.pop(id, None)
            late = batch is self._timeout.late
            self._fail(batch, self._timeout.error() if late else error)
            if late:
                self._timeout.late = None
        for request in requests.values():
            self._completions.post(Post(request, InferResponse(None, error), True, None))
        for call in calls:
            call.drop()
        for answer in asked.values():
            answer(False)
        if not self._stopping.is_set():
            if time.monotonic() - self._started_at > STEADY_SECONDS:
                self._pause = FIRST_PAUSE
            # only now: finalize() may wait for it at once
            self._supervisor = threads.start_surely(self._restart, process, name=f"{self.name}-supervisor")

    def _restart(self, old: Process) -> None:
        old.close()
        while not self._stopping.wait(self._pause):
            self._pause = min(self._pause * 2, MAX_PAUSE)
            try:
                self._incarnate()
            except Exception as error:
                log.error("restart of %s failed: %s", self.name, error)
                self._cause = f"the model instance '{self.name}' could not be restarted: {text_of(error)}"
                self.reason = self._cause
                self._not_restarted()
                continue
            self._restarts += 1
            log.warning("%s runs again", self.name)
            self._completions.post(OnLoop(self.on_health))
            return
        self._not_restarted()

    def finalize(self) -> None:
        self.abort()  # ends a restart, too
        process = self._process
        if process is None:
            if self._supervisor is not None:
                self._supervisor.join(self._limit + 5)
            process = self._process
            if process is None:
                return
        self._send_finalize(process)
        try:
            process.awaited(self._answers, "finalized", FINALIZE_SECONDS, "finalize")
        except TritonError as error:
            log.error("%s", error)
            process.kill()
        process.close()

    def let_go(self) -> None:
        super().let_go()
        self._timeout.stop()

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
        process.send({"t": "is_ready", "k": id}, [])
        return answer.get()  # the process's answer, or False from its end

    # ------------------------------------------------------------ execution

    def execute(self, batch: Batch) -> None:
        raise AssertionError("overlapping instances are given batches through begin()")

    def describe_failure(self, error: BaseException) -> TritonError:
        return error if isinstance(error, TritonError) else Internal(text_of(error), reason=Reason.BACKEND)

    def begin(self, batch: Batch) -> None:
        process = self._process
        if process is None:
            self._fail(batch, Internal(self._cause, reason=Reason.BACKEND))
        else:
            process.post(lambda: self._send_batch(process, batch))

    def _watch(self) -> None:
        self._timeout.watch(1 if self.in_order else self.capacity)

    def _first(self) -> tuple[Batch, int, Process] | None:
        """The running batch that began first, when it began (monotonic ns), and its process; None if none runs."""
        with self._lock:
            process = self._process
            for batch, _ in self._batches.values():
                return None if process is None else (batch, batch.compute_start, process)
        return None

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        process = self._process
        if process is not None:  # the state of a child that has ended is gone anyway
            process.post_message({"t": "sequence_end", "c": sequence_id, "reason": reason})

    def _fail(self, batch: Batch, error: TritonError) -> None:
        batch.error = error
        batch.compute_start = batch.compute_start or monotonic_ns()
        batch.compute_end = monotonic_ns()
        self._completions.post(batch)

    def _send_batch(self, process: Process, batch: Batch) -> None:
        batch.compute_start = monotonic_ns()
        rows: list[dict[str, Any]] = []
        ids: list[int] = []
        sent = []
        for request in batch.requests:
            id = next(self._numbers)
            ids.append(id)
            sent.append(self._request_row(id, request, rows))
        number = next(self._numbers)
        with self._lock:
            alive = self._process is process
            if alive:
                self._batches[number] = (batch, ids)
                self._requests.update(zip(ids, batch.requests, strict=True))
        if not alive:
            self._fail(batch, Internal(self._cause, reason=Reason.BACKEND))
            return
        if self._timeout.limited:
            self._completions.post(OnLoop(self._watch))
        cancelled = []
        for id, request in zip(ids, batch.requests, strict=True):
            on_cancel = self._on_cancel(process, id, request)
            request.on_cancel = on_cancel
            if request.cancelled:
                cancelled.append(on_cancel)
        process.send(
            {
                "t": "execute",
                "batch": number,
                "model": self._args["model_name"],
                "version": int(self._args["model_version"]),
                "requests": sent,
            },
            rows,
        )
        for on_cancel in cancelled:
            on_cancel()

    def _on_cancel(self, process: Process, id: int, request: InferRequest) -> Callable[[], None]:
        return lambda: process.post_message({"t": "cancel", "r": id, "read": request.still_read})

    def _request_row(self, id: int, request: InferRequest, rows: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = wanted_names(request)
        return {
            "r": id,
            "id": request.id,
            "c": request.sequence_id,
            "f": (1 if request.sequence_start else 0) | (2 if request.sequence_end else 0),
            "timeout": request.timeout_us,
            "p": request.parameters,
            "w": wanted,
            "o": self._output_names if request.outputs is None else [o.name for o in request.outputs],
            "trace": request.trace is not None,
            "context": None if request.trace is None else request.trace.context(),
            "in": [row_of(tensor, rows) for tensor in request.inputs],
        }

    # ------------------------------------------------------------ messages of the child

    def _message(self, process: Process, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "result":
            self._result(process, message)
        elif kind == "send":
            self._sent(process, message)
        elif kind == "call":
            self._call(process, message)
        elif kind == "dropped":
            request = self._requests.pop(message["r"], None)
            if request is not None:
                self._completions.post(Post(request, InferResponse(None, dropped(request)), True, None))
        elif kind == "is_ready":
            answer = self._asked.pop(message["k"], None)
            if answer is not None:
                answer(bool(message["ready"]))
        elif kind == "memory":
            self._memory_told(process, message["rows"])
        elif not self._host.message(process, message):
            for descriptor in message.pop("descriptors", ()):  # no expected answer has any
                os.close(descriptor)
            if self._answers.qsize() >= MOST_ANSWERS:
                raise Violation("answers to what nobody asked")
            self._answers.put(message)

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

    def _response(
        self, process: Process, request: InferRequest, row: dict[str, Any], blob: bytearray
    ) -> InferResponse:
        if row.get("e") is not None:
            text, code = row["e"]
            return InferResponse(None, TritonError(valid(text), CODES[code], Reason.BACKEND), row["p"])
        made = known(request, [received(process, t, blob) for t in row["o"]])
        return InferResponse(made, None, row["p"])

    def _result(self, process: Process, message: dict[str, Any]) -> None:
        """Takes the answers of a batch. Reads all before it uses any, so that a malformed one fails the whole batch."""
        with self._lock:
            batch, ids = self._batches.get(message["batch"], (None, []))
        if batch is None:
            return
        read: list[InferResponse | str] = []
        if "error" not in message:
            for request, answer in zip(batch.requests, message["answers"], strict=True):
                if answer in ("open", "reschedule"):
                    read.append(answer)
                else:
                    read.append(self._response(process, request, answer, message["blob"]))
        elif not isinstance(message["error"], str):
            raise Violation("an error that is no text")
        began, made, executed = message["times"][:3]
        floor, now = 0, monotonic_ns()
        times = [floor := min(max(int(time_ns), floor), now) for time_ns in (began, made, executed)]
        with self._lock:
            self._batches.pop(message["batch"], None)
        batch.compute_start, batch.input_end, batch.output_start = times
        if "error" in message:
            batch.error = Internal(valid(message["error"]), reason=Reason.BACKEND)
            with self._lock:
                for id in ids:
                    self._requests.pop(id, None)
        else:
            self._answered(batch, ids, read)
        batch.compute_end = monotonic_ns()
        self._completions.post(batch)

    def _answered(self, batch: Batch, ids: list[int], read: list[InferResponse | str]) -> None:
        requests: list[InferRequest] = []
        responses: list[InferResponse | None] = []
        for id, request, answer in zip(ids, batch.requests, read, strict=True):
            response: InferResponse | None = None
            if answer == "open":
                if not self._decoupled:
                    continue
            else:
                self._requests.pop(id, None)
                if isinstance(answer, str):
                    self._completions.post(Reschedule(request))
                    continue
                response = answer
            requests.append(request)
            responses.append(response)
        if len(requests) != len(batch.requests):
            batch.requests = requests
        batch.responses = responses

    def _sent(self, process: Process, message: dict[str, Any]) -> None:
        id, final, size = message["r"], message["final"], message["size"]
        request = self._requests.get(id)
        if request is None:
            process.post_message({"t": "ack", "r": id, "size": size})
            return
        if message["a"] is None:
            made = InferResponse()
            made.null = True
        else:
            made = self._response(process, request, message["a"], message["blob"])
        if final:
            self._requests.pop(id, None)
        made.produced_ns = monotonic_ns()
        ack = {"t": "ack", "r": id, "size": size}
        self._completions.post(Post(request, made, bool(final), lambda: process.post_message(ack)))

    def _call(self, process: Process, message: dict[str, Any]) -> None:
        batch = self._batches.get(message["batch"], (None, []))[0]
        parent = None
        if message["parent"] is not None:
            parent = self._requests.get(message["parent"])
        elif batch is not None and len(batch.requests) == 1:
            parent = batch.requests[0]
        waits = message["blocking"] and batch is not None and self.capacity == 1
        self._host.call(process, message, parent, batch.instance if waits and batch else None)
