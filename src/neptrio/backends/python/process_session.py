"""One process of an isolated model and its rings, from start to end.

Rules:
 1. Only the trio thread uses a ring. Other threads post functions to the trio thread.
 2. Each process has its own shared memory. The next process gets new memory.
 3. A call to another model is kept in a table until its last response. When the process ends, all in the table are dropped.
    Beyond MOST_CALLS a call is answered with an error.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

from neptrio.backends.python.bls import Call, OnLoop
from neptrio.backends.python.convert import NUMBERS
from neptrio.backends.python.model_runner import Reschedule, dropped
from neptrio.backends.python.process import Process
from neptrio.backends.python.ring_reader import GivenBlock
from neptrio.backends.python.ring_sender import Layout
from neptrio.backends.python.ring_server import ServerSide
from neptrio.cores import usable_cores
from neptrio.errors import Unavailable
from neptrio.execution.batch import Batch
from neptrio.request import foreign_memory
from neptrio.request.infer_request import InferRequest, InferResponse, monotonic_ns
from neptrio.rings.body_area import BodyMemory
from neptrio.rings.line import Lease
from neptrio.rings.message import Violation
from neptrio.rings.ring import Segment, is_sealed
from triton_python_backend_utils._process.reserved import sealed_memory

if TYPE_CHECKING:
    from neptrio.backends.python.isolated import IsolatedInstance

log = logging.getLogger("neptrio.python")

AREA_BYTES = 64 << 20  # for messages in each direction; pages that are never written take no memory
BODIES_BYTES = 128 << 20  # for bodies of requests that are received straight into it
# how long a process asks for the answer to its call before it falls asleep: a quick model's comes within that, and both
# wake-ups that are spared cost more. With one core, asking would keep the answer from being made.
SPIN_NS = 500_000 if usable_cores() > 1 else 0
# the file of cext/rings/plain_ring.c, which an interpreter of any version loads; "" where it was not built
_plain = importlib.util.find_spec("neptrio.rings.plain_ring")
PLAIN_LIBRARY = "" if _plain is None else str(_plain.origin)
MOST_CALLS = 16_384  # of other models, at once
FIRST_LOOK_NS, LAST_LOOK_NS = 1_000_000, 50_000_000  # between two checks of a ring that was full

foreign_memory.declare(Lease, GivenBlock, Segment, BodyMemory)


class IsolatedCall(Call):
    """A call of an isolated model, whose responses are sent without conversion."""

    def receive(self, response: InferResponse) -> Any:
        return response


class ProcessSession:
    """One process of an instance and its rings, from start to end. ServerSide calls its methods for what arrives."""

    def __init__(self, instance: IsolatedInstance, process: Process, services: Any, decoupled: bool) -> None:
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
        self.end = ServerSide(segment, layout, self, decoupled)
        self.registered = self.over = False
        self._lagging = False
        self._pause_ns = FIRST_LOOK_NS

    @property
    def rings(self) -> dict[str, Any]:
        """What the process is told of the rings, with the descriptors of `memory` and `bell`."""
        return {"layout": vars(self.layout), "spin_ns": SPIN_NS, "library": PLAIN_LIBRARY}

    def register(self) -> None:
        """Begins to listen for the process's doorbell, unless the process has ended."""
        if not (self.registered or self.over):
            self._services.doorbells.register(self.bell, self.end.drain)
            self.registered = True

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
        # before it looks: what begins to wait meanwhile, on another thread, calls lag() again
        self._lagging = False
        if self.end.look():
            self._pause_ns = min(self._pause_ns * 2, LAST_LOOK_NS)
            self.lag()
        else:
            self._pause_ns = FIRST_LOOK_NS

    # ------------------------------------------------------------ called by ServerSide

    def called(
        self,
        key: int,
        request: InferRequest,
        decoupled: bool,
        blocking: bool,
        timed: bool,
        batch: Batch | None,
    ) -> None:
        """The model calls another model; `key` is the process's number of the call. `timed`: its last response is to say when
        the request was where."""
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
            self.end.respond(key, response, final, main, NUMBERS, request if timed and final else None)

        if len(self.calls) >= MOST_CALLS:
            deliver(
                InferResponse(
                    None, Unavailable(f"a process has at most {MOST_CALLS} calls of other models under way")
                ),
                True,
            )
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

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        """The model reports the durations of a response."""
        self.instance.on_response(place, outcome, computing_ns, output_ns)

    def reschedule(self, request: InferRequest) -> None:
        """The model wants to execute a request again. Called before its batch is delivered, because that would
        otherwise end its sequence."""
        Reschedule(request).deliver()

    def send_segment(self, segment: Segment, number: int) -> None:
        """Sends the descriptor of a segment over the socket: shared memory for one message too large for the ring."""

        self.process.post(lambda: self.process.send({"t": "message_segment", "k": number}, [segment.fd]))

    def segment_came(self, message: dict[str, Any]) -> None:
        """Takes the descriptor of a segment that the process sent. Reader thread."""
        descriptors = message["descriptors"]
        segment: Segment | None = None
        number, size = message["k"], message["size"]
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise Violation("a segment whose number cannot be")
        if (
            len(descriptors) == 1
            and type(size) is int
            and 0 < size < 1 << 48
            and is_sealed(descriptors[0], size)
        ):
            segment = Segment(descriptors.pop(), size)

        def came() -> None:
            self.end.segment_came(number, segment)
            self._services.doorbells.ring(self.bell)

        self._completions.post(OnLoop(came))

    def violated(self, text: str) -> None:
        """Kills the process, because it wrote to a ring what no correct process writes."""
        log.error("%s: its process wrote %s", self.instance.name, text)
        self.process.killed_for = f"it wrote {text}"
        self.process.kill()
