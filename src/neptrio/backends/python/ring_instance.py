"""A Python model in a process of its own whose requests cross through shared memory.

What is supervised, restarted and asked is as in neptrio.backends.python.isolated; batches, responses
and calls to other models take the rings (cext/backends/python/ring_server). docs/isolation.md has the whole picture.

Rules:
 1. Everything about a ring happens on the trio thread. Other threads post to it.
 2. An end of a process is told on the reader thread, and dealt with on the trio thread: what the process
    had answered before it ended still counts.
 3. One life of a process has its own shared memory. The next one starts with new pages.
 4. What a process had not begun when it ended waits for the next one, and so does what comes until that
    runs; where it does not start, they fail. A sequence's requests do not: its state ended with the process.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from neptrio.backends.python.bls import Call, OnLoop
from neptrio.backends.python.convert import NUMBERS
from neptrio.backends.python.instance import Post, Reschedule, dropped
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.backends.python.isolated_host import IsolatedCall
from neptrio.backends.python.process import Process
from neptrio.backends.python.ring_server import Layout, ServerEnd
from neptrio.backends.python.template import Template
from neptrio.errors import Internal, Reason
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import InferRequest, InferResponse, monotonic_ns
from neptrio.rings.ring import SUPPORTED, Segment, is_sealed, sealed_memory

log = logging.getLogger("neptrio.python")

AREA_BYTES = 64 << 20  # for messages each way; pages that were never touched take no memory
SPIN_NS = 0
FIRST_LOOK_NS, LAST_LOOK_NS = 1_000_000, 50_000_000  # between two looks at a ring that was full

__all__ = ["SUPPORTED", "RingInstance"]


class Life:
    """One life of the process, as the rings see it: what ServerEnd tells."""

    def __init__(self, instance: RingInstance, process: Process, services: Any, decoupled: bool) -> None:
        self.instance = instance
        self.process = process
        self.calls: dict[int, Call] = {}
        self._services = services
        self._completions = services.completions
        layout = Layout(AREA_BYTES)
        self.layout = layout
        memory = sealed_memory("neptrio-rings", layout.size)
        segment = Segment(memory, layout.size)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.memory = memory
        self.end = ServerEnd(segment, layout, self, decoupled)
        self.registered = self.over = False
        self._lagging = False
        self._pause_ns = FIRST_LOOK_NS

    def register(self) -> None:
        """The bell is heard from now on."""
        self.registered = True
        self._services.doorbells.register(self.bell, self.end.drain)

    def close(self) -> None:
        """Nothing of the process is heard any more."""
        self.over = True
        if self.registered:
            self.registered = False
            self._services.doorbells.unregister(self.bell)
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1

    # ------------------------------------------------------------ a ring that was full

    def lag(self) -> None:
        """Something waits for room in a ring. The process rings no bell for taking, so it is looked at
        again after a while, for as long as that lasts."""
        if not self._lagging:
            self._lagging = True
            self._completions.post(OnLoop(self._wait_for_room))

    def _wait_for_room(self) -> None:
        self._services.timers.at(monotonic_ns() + self._pause_ns, self._look_for_room)

    def _look_for_room(self) -> None:
        self._lagging = False
        self._pause_ns = min(self._pause_ns * 2, LAST_LOOK_NS)
        self.end.flush()
        if not self._lagging:
            self._pause_ns = FIRST_LOOK_NS

    # ------------------------------------------------------------ what the ring's end tells

    def called(
        self, key: int, request: InferRequest, decoupled: bool, blocking: bool, batch: Batch | None
    ) -> None:
        """The model asks another model."""
        if key in self.calls:
            self.violated(f"a second call with number {key}")
            return
        waiting = batch.instance if blocking and batch is not None and self.instance.capacity == 1 else None

        def deliver(response: InferResponse | None, final: bool) -> None:
            if final:
                self.calls.pop(key, None)
            self.end.respond(key, response, final, blocking, NUMBERS)

        call = IsolatedCall(self._services, request, decoupled, deliver, waiting)
        self.calls[key] = call
        call.submit()

    def took(self, key: int) -> None:
        """It has taken a response of a decoupled model."""
        call = self.calls.get(key)
        if call is not None:
            call.took_here()

    def call_cancelled(self, key: int, dropped: bool) -> None:
        """It cancels a call; `dropped`: and reads no more of its responses."""
        call = self.calls.get(key)
        if call is not None:
            if dropped:
                call.drop()
            else:
                call.cancel()

    def dropped(self, request: InferRequest) -> Any:
        """The error of a request whose sender was dropped."""
        return dropped(request)

    def reschedule(self, request: InferRequest) -> None:
        """The model wants to see a request again. Said before its batch is delivered, which would end its
        sequence otherwise."""
        Reschedule(request).deliver()

    def send_segment(self, segment: Segment, number: int) -> None:
        """A message that does not fit takes a segment of its own: its descriptor goes over the socket."""

        def send() -> None:
            try:
                self.process.wire.send_descriptors({"t": "message_segment", "k": number}, [segment.fd])
            except OSError:
                pass  # the process is gone, which its reader notices

        self.process.post(send)

    def segment_came(self, message: dict[str, Any]) -> None:
        """The same from the process (reader thread)."""
        descriptors = message["descriptors"]
        segment: Segment | None = None
        size = message["size"]
        if (
            len(descriptors) == 1
            and type(size) is int
            and 0 < size < 1 << 48
            and is_sealed(descriptors[0], size)
        ):
            segment = Segment(descriptors.pop(), size)
        for descriptor in descriptors:
            os.close(descriptor)

        def came() -> None:
            self.end.segment_came(message["k"], segment)
            self.end.drain()

        self._completions.post(OnLoop(came))

    def violated(self, text: str) -> None:
        """The process is not what it should be: it ends."""
        log.error("%s: its process wrote %s", self.instance.name, text)
        self.process.killed_for = f"it wrote {text}"
        self.process.kill()


class RingInstance(IsolatedInstance):
    """See the module's text."""

    deep = True

    def __init__(
        self, *args: Any, version: int, read_only: bool, execute_seconds: float | None, origin: Template
    ) -> None:
        super().__init__(*args)
        self._execute_seconds = execute_seconds
        self._origin = origin
        self._version = version
        self._read_only = read_only
        self._life: Life | None = None  # what serves; trio thread
        self._latest: Life | None = None  # the last that was started, serving or not
        self._between = False  # a process has ended, and the next one is being started
        self._waiting: list[Batch] = []  # for it, in order

    def _spawn(self) -> Process:
        return Process(
            *(self.name, self._python, self._message, self._ended),
            rings=True,
            environ=self._environ,
            limits=self._resources,
            origin=self._origin,
        )

    def _send_initialize(self, process: Process, message: dict[str, Any]) -> None:
        life = self._latest = Life(self, process, self._services, self._decoupled)
        message["rings"] = {
            "layout": vars(life.layout),
            "model": self._args["model_name"],
            "version": self._version,
            "outputs": self._output_names,
            "read_only": self._read_only,
            "spin_ns": SPIN_NS,
        }
        try:
            process.wire.send_descriptors(message, [life.memory, life.bell])
        except OSError:
            pass  # the process is gone, which its reader notices

    def _started(self, process: Process) -> None:
        life = self._latest
        assert life is not None
        self._completions.post(OnLoop(lambda: self._begins(life)))

    def _begins(self, life: Life) -> None:
        """On the trio thread: a process serves, first what waits for it."""
        if life.over:  # it has ended meanwhile
            return
        life.register()
        self._life = life
        self._between = False
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self.begin(batch)

    def _not_restarted(self) -> None:
        self._completions.post(OnLoop(self._give_up))

    def _give_up(self) -> None:
        self._between = False
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._fail(batch, Internal(self._cause, reason=Reason.BACKEND))

    def _ended(self, process: Process) -> None:
        life = self._latest
        super()._ended(process)
        if life is not None and life.process is process:
            self._completions.post(OnLoop(lambda: self._life_over(life)))

    def _life_over(self, life: Life) -> None:
        """On the trio thread: what the process answered counts, the rest fails with the cause."""
        life.end.drain()
        if self._life is life:
            self._life = None
            self._between = not self._stopping.is_set()
        untouched = life.end.untouched(self.capacity == 1) if self._between else []
        batches, requests = life.end.end()
        life.close()
        error = Internal(self._cause, reason=Reason.BACKEND)
        late, self._late = self._late, None
        for batch in batches:
            if batch in untouched and not any(request.sequence_id for request in batch.requests):
                self._waiting.append(batch)
            else:
                self._fail(batch, self._too_late() if batch is late else error)
        for request in requests:
            self._completions.post(Post(request, InferResponse(None, error), True, None))
        for call in list(life.calls.values()):
            call.drop()

    def _send_finalize(self, process: Process) -> None:
        super()._send_finalize(process)
        life = self._latest
        if life is not None:
            self._completions.post(OnLoop(life.end.look))

    def begin(self, batch: Batch) -> None:
        life = self._life
        if (life is None or life.end.closed) and self._between:
            self._waiting.append(batch)
        elif life is None or life.end.closed:
            self._fail(batch, Internal(self._cause, reason=Reason.BACKEND))
        else:
            life.end.begin(batch)
            self._watch_from_now()

    def _first(self) -> tuple[Batch, int, Process] | None:
        life = self._life
        found = None if life is None else life.end.oldest
        return None if found is None or life is None else (*found, life.process)

    @property
    def ahead(self) -> int:
        life = self._life
        return 0 if life is None else int(life.end.occupancy)

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        life = self._life
        if life is not None:
            life.end.sequence_ended(sequence_id, reason)

    def _message(self, process: Process, message: dict[str, Any]) -> None:
        if message["t"] == "message_segment":
            life = self._latest
            if life is not None and life.process is process:
                life.segment_came(message)
            else:
                for descriptor in message["descriptors"]:
                    os.close(descriptor)
        else:
            super()._message(process, message)
