"""When the answers of traced calls are sent: calls that a front end passes on whole, as generate and infer_stream.

The problem is that of infer requests (cext/frontend/sending), and so is the choice: the engine's trace stays open until the
front end has told when it sent the answer. But the front end understands nothing of these calls. So the engine puts frames
around the bytes that stand for traced responses:

    TRACED   HEADERS   BODY ...   WHOLE      to the front end
    SENT                                     from it: when it began to send them, and when it had sent them

Rules:
 1. SENT is owed for every WHOLE of a call, in their order. One that says 0 stands for all that is owed for its call: the client
    is gone.
 2. The engine waits for nobody in vain: when a front end has ended, traces end without the times that it owes, and one
    that owes MOST_AWAITED is asked for no more; such traces have the engine's own times.
 3. What SENT says is believed within what can be (Trace.sent_apart). One that nobody waits for means nothing.
 4. A client that has an answer finds its trace: the front end has the call in `Engine.telling` from TRACED on until it has told,
    and looks there before it says to the engine that it has told of everything.
"""

from __future__ import annotations

import struct
from collections import deque

from neptrio.frontend.frames import Frames, Kind
from neptrio.observe.trace import Trace
from neptrio.request.infer_request import monotonic_ns
from neptrio.transport.rest.times import Traced

MOST_AWAITED = 16384  # SENT that one front end owes
LATEST = 1 << 62
SPAN = struct.Struct("<QQ")
NEVER = SPAN.pack(0, 0)


class CallSends:
    """Of one call, in a front end: when its traced responses are sent."""

    def __init__(self, frames: Frames, number: int, telling: set[int]) -> None:
        self._frames = frames
        self._number = number
        self._telling = telling
        self._start = self._end = 0

    def begins(self) -> None:
        """TRACED has come."""
        self._start = 0
        self._telling.add(self._number)

    def sends(self) -> None:
        """A part of the answer is about to be sent."""
        self._start = self._start or monotonic_ns()

    def sent(self) -> None:
        """It was sent."""
        self._end = monotonic_ns()

    def whole(self) -> None:
        """WHOLE has come."""
        self._frames.send(Kind.SENT, self._number, SPAN.pack(self._start, self._end))
        self._telling.discard(self._number)

    def end(self, owed: bool) -> None:
        """The call has ended here; with `owed`, a WHOLE has come that nobody looks at any more."""
        if owed:
            self._frames.send(Kind.SENT, self._number, NEVER)
        self._telling.discard(self._number)


class AwaitedCalls:
    """Traces of the calls of one front end that wait for SENT. In the engine."""

    def __init__(self) -> None:
        self.owed: dict[
            int, deque[list[Trace]]
        ] = {}  # call -> the traces of each WHOLE, one for each response
        self._count = 0
        self._ended = False

    def wants(self, number: int) -> bool:
        """Whether the front end is to tell of responses of a call that are about to be sent."""
        return self._ended or number in self.owed or self._count < MOST_AWAITED

    def expect(self, number: int, responses: Traced) -> None:
        """They were given to the front end, and WHOLE behind them."""
        if self._ended:
            return  # they are not sent
        handed = [trace for trace, count in responses for _ in range(count) if trace.hand_on_one()]
        self.owed.setdefault(number, deque()).append(handed)
        self._count += 1

    def told(self, number: int, payload: bytes) -> None:
        """SENT has come. Raises ValueError for what cannot be one."""
        if len(payload) != SPAN.size:
            raise ValueError(f"{len(payload)} bytes that should tell when an answer was sent")
        start, end = SPAN.unpack(payload)
        owed = self.owed.get(number)
        if owed is None:
            return
        if not end:
            self.forget(number)
            return
        self._count -= 1
        for trace in owed.popleft():
            trace.sent_apart(min(start, LATEST), min(end, LATEST))
        if not owed:
            del self.owed[number]

    def forget(self, number: int) -> None:
        """What is owed for that call will not be told."""
        owed = self.owed.pop(number, ())
        self._count -= len(owed)
        for traces in owed:
            for trace in traces:
                trace.abandon()

    def gone(self) -> None:
        """The front end has ended."""
        self._ended = True
        for number in list(self.owed):
            self.forget(number)
