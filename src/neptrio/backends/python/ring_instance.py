"""A Python model in a process of its own, whose requests cross in shared memory.

Supervision, restarts and questions work as in neptrio.backends.python.isolated. Batches, responses and calls to other
models cross on rings (cext/backends/python/ring_server.pyx). docs/isolation.md describes all of it.

Rules:
 1. Only the trio thread uses a ring. Other threads post functions to the trio thread.
 2. The reader thread notices that a process has ended, but the trio thread handles it: answers that the process wrote
    to its ring before it ended are still used.
 3. Each process has its own shared memory. The next process gets new memory.
 4. Batches that a process had not begun when it ended, and those that come after that, wait for the next process. If
    that does not start, they fail. Requests of a sequence fail at once, because its state ended with the process; so do
    those that were received into the memory that it could write to.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

from neptrio.backends.python import isolated_host
from neptrio.backends.python.bls import Call, OnLoop
from neptrio.backends.python.burst_pause import BurstPause
from neptrio.backends.python.convert import NUMBERS
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.backends.python.isolated_host import IsolatedCall
from neptrio.backends.python.model_runner import Post, Reschedule, dropped
from neptrio.backends.python.process import Process
from neptrio.backends.python.ring_reader import GivenBlock
from neptrio.backends.python.ring_sender import Layout
from neptrio.backends.python.ring_server import Lease, ServerEnd
from neptrio.backends.python.template import Template
from neptrio.cores import usable_cores
from neptrio.errors import Internal, Reason
from neptrio.execution.batch import Batch
from neptrio.request import foreign_memory
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor, monotonic_ns
from neptrio.rings.body_area import BodyMemory
from neptrio.rings.ring import SUPPORTED, Segment, is_sealed, sealed_memory

log = logging.getLogger("neptrio.python")

AREA_BYTES = 64 << 20  # for messages in each direction; pages that are never written take no memory
BODIES_BYTES = 128 << 20  # for bodies of requests that are received straight into it
# how long a process asks for the answer to its call before it falls asleep: a quick model's comes within that, and both
# wake-ups that are spared cost more. With one core, asking would keep the answer from being made.
SPIN_NS = 500_000 if usable_cores() > 1 else 0
# the file of cext/rings/plain_ring.c, which an interpreter of any version loads; "" where it was not built
_plain = importlib.util.find_spec("neptrio.rings.plain_ring")
PLAIN_LIBRARY = "" if _plain is None else str(_plain.origin)
FIRST_LOOK_NS, LAST_LOOK_NS = 1_000_000, 50_000_000  # between two checks of a ring that was full

foreign_memory.declare(Lease, GivenBlock, Segment, BodyMemory)

__all__ = ["SUPPORTED", "RingInstance"]


class Life:
    """One process of an instance and its rings, from start to end. ServerEnd calls its methods for what arrives."""

    def __init__(self, instance: RingInstance, process: Process, services: Any, decoupled: bool) -> None:
        self.instance = instance
        self.process = process
        self.calls: dict[int, Call] = {}
        self._services = services
        self._completions = services.completions
        layout = Layout(AREA_BYTES, BODIES_BYTES)
        self.layout = layout
        memory = sealed_memory("neptrio-rings", layout.size)
        segment = Segment(memory, layout.size)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.memory = memory
        self.end = ServerEnd(segment, layout, self, decoupled)
        self.registered = self.over = False
        self._lagging = False
        self._pause_ns = FIRST_LOOK_NS
        self._burst_pause = BurstPause()
        self._resting = False

    def register(self) -> None:
        """Begins to listen for the process's doorbell."""
        self.registered = True
        self._services.doorbells.register(self.bell, self.end.drain)

    def drain_all(self) -> None:
        """Takes everything that the process, which has ended, had pushed."""
        self.over = True
        for _ in range(self.layout.done_entries):  # a process of the model's own may go on writing
            if not self.end.drain():
                break

    def close(self) -> None:
        """Stops listening to the process."""
        self.over = True
        if self.registered:
            self.registered = False
            self._services.doorbells.unregister(self.bell)
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1

    # ------------------------------------------------------------ a ring that was full

    def lag(self) -> None:
        """Called when something waits for room in a ring. The process does not ring when it takes messages, so a timer
        checks the ring again and again until there is room."""
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

    # ------------------------------------------------------------ called by ServerEnd

    def portion_taken(self) -> bool:
        """A portion of a burst was taken. Whether to go on at once; if not, a timer sees to it."""
        now = monotonic_ns()
        rest = 0 if self.over else self._burst_pause.after_portion(now, self._services.doorbells.turns)
        if rest and not self._resting:  # what comes during a rest does not begin another
            self._resting = True
            self._services.timers.at(now + rest, self._has_rested)
        return not rest

    def _has_rested(self) -> None:
        self._resting = False
        self._go_on()

    def _go_on(self) -> None:
        self._services.doorbells.ring(self.bell)

    def called(
        self, key: int, request: InferRequest, decoupled: bool, blocking: bool, batch: Batch | None
    ) -> None:
        """The model calls another model; `key` is the process's number of the call."""
        if key in self.calls:
            self.violated(f"a second call with number {key}")
            return
        main = (
            blocking and not decoupled
        )  # any thread of the model may read the responses of a decoupled model
        waiting = batch.instance if blocking and batch is not None and self.instance.capacity == 1 else None

        def deliver(response: InferResponse | None, final: bool) -> None:
            if final:
                self.calls.pop(key, None)
            self.end.respond(key, response, final, main, NUMBERS)

        if len(self.calls) >= isolated_host.MOST_CALLS:
            deliver(InferResponse(None, isolated_host.too_many_calls()), True)
            return
        call = IsolatedCall(self._services, request, decoupled, deliver, waiting)
        self.calls[key] = call
        call.submit()

    def took(self, key: int) -> None:
        """The model has taken a response of a decoupled model that it called."""
        call = self.calls.get(key)
        if call is not None:
            call.took_here()

    def call_cancelled(self, key: int, dropped: bool) -> None:
        """The model cancels a call. `dropped` says that it reads no more of the call's responses."""
        call = self.calls.get(key)
        if call is not None:
            if dropped:
                call.drop()
            else:
                call.cancel()

    def dropped(self, request: InferRequest) -> Any:
        """The error of a request whose model dropped its response sender before the final response."""
        return dropped(request)

    def reschedule(self, request: InferRequest) -> None:
        """The model wants to execute a request again. Called before its batch is delivered, because that would
        otherwise end its sequence."""
        Reschedule(request).deliver()

    def send_segment(self, segment: Segment, number: int) -> None:
        """Sends the descriptor of a segment over the socket: shared memory for one message too large for the ring."""

        def send() -> None:
            try:
                self.process.wire.send_descriptors({"t": "message_segment", "k": number}, [segment.fd])
            except OSError:
                pass  # the process has ended; its reader notices that

        self.process.post(send)

    def segment_came(self, message: dict[str, Any]) -> None:
        """Takes the descriptor of a segment that the process sent. Reader thread."""
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
            self._go_on()

        self._completions.post(OnLoop(came))

    def violated(self, text: str) -> None:
        """Kills the process, because it wrote to a ring what no correct process writes."""
        log.error("%s: its process wrote %s", self.instance.name, text)
        self.process.killed_for = f"it wrote {text}"
        self.process.kill()


class RingInstance(IsolatedInstance):
    """A backend instance whose model runs in a child process; requests cross in shared memory."""

    deep = True

    def __init__(self, *args: Any, version: int, read_only: bool, origin: Template) -> None:
        super().__init__(*args)
        self._origin = origin
        self._version = version
        self._read_only = read_only
        self._life: Life | None = None  # the process that serves; trio thread
        self._latest: Life | None = None  # the last process that was started
        self._between = False  # a process has ended and the next is starting
        self._waiting: list[Batch] = []  # batches for the next process, in order

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
            "library": PLAIN_LIBRARY,
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
        """Lets a started process serve, beginning with the batches that wait for it. Trio thread."""
        if life.over:  # it has ended already
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
        """Handles the end of a process: uses what it had answered, and fails the rest (rules 2, 4). Trio thread."""
        life.drain_all()
        if self._life is life:
            self._life = None
            self._between = not self._stopping.is_set()
        untouched = life.end.untouched(self.capacity == 1) if self._between else []
        batches, requests = life.end.end()
        life.close()
        error = Internal(self._cause, reason=Reason.BACKEND)
        late, self._timeout.late = self._timeout.late, None
        for batch in batches:
            if batch in untouched and not self._bound_to(life, batch):
                self._waiting.append(batch)
            else:
                self._fail(batch, self._timeout.error() if batch is late else error)
        for request in requests:
            self._completions.post(Post(request, InferResponse(None, error), True, None))
        for call in list(life.calls.values()):
            call.drop()

    def let_go(self) -> None:
        super().let_go()
        life = self._latest
        if life is not None and life.over:  # that of a process which has just ended by itself may not be yet
            self._latest = None

    def _bound_to(self, life: Life, batch: Batch) -> bool:
        """Whether a batch cannot be given to the next process: the state of its sequence is gone, or its bytes lie
        where the process that has ended, who knows why, may have written."""
        return any(request.sequence_id for request in batch.requests) or life.end.received_here(batch)

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
            self._watch()

    def _first(self) -> tuple[Batch, int, Process] | None:
        life = self._life
        found = None if life is None else life.end.oldest
        return None if found is None or life is None else (*found, life.process)

    @property
    def ahead(self) -> int:
        life = self._life
        return 0 if life is None else int(life.end.occupancy)

    def body_memory(self, size: int) -> Any:
        life = self._life
        return None if life is None else life.end.body_memory(size)

    @property
    def body_bytes(self) -> int:
        life = self._life
        return 0 if life is None else life.end.body_bytes

    def holds_body(self, tensor: Tensor) -> bool:
        life = self._life
        return life is not None and life.end.holds_body(tensor)

    def _bytes(self) -> tuple[int, int]:
        life = self._life
        return (0, 0) if life is None else (life.end.copied, life.end.in_place)

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
