"""One inference, whatever form it has on the wire: the steps from its message to a request, and who does them.

The problem: inflating and decoding a message takes a moment or milliseconds, and what takes long must not hold up the loop,
nor make more bytes than the server has room for. Written for each form, it differed. The choice: the steps and where they
are done are here; a codec of each form (JSON and binary, generate, messages of gRPC) extends this class and says how.

Rules:
 1. take() does what takes a moment. If it returns False, take_later() has the rest done by workers.
 2. What a message inflates to, and what a worker makes of it, is counted in the server's budgets before there is memory for
    it, until give_back().
 3. Who awaits take_later() may be cancelled at any time: the worker is asked to stop, and gets no more bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from neptrio.codec.inflate import Inflater, TooLong, Undecodable
from neptrio.codec.json_reader import Stop
from neptrio.codec.outputs import select
from neptrio.codec.shared_memory import AskedFromThread
from neptrio.errors import TritonError
from neptrio.observe.propagation import asked
from neptrio.observe.timing import wish
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.service import Services
from neptrio.transport.header_policy import Forwarded
from neptrio.transport.reservation import Kept, Reservation

T = TypeVar("T")
Reserve = Callable[[int], None] | None  # called by a worker before it allocates so many bytes
INFLATED_HERE = 64 << 10  # bytes; workers inflate larger messages, and what becomes larger
CALLS_HERE = 32  # of zlib: a message may consist of very many tiny compressed parts


class InferCall:
    """A message on its way to admission; codecs extend it."""

    __slots__ = (
        "_body",
        "_inflater",
        "_kept",
        "forwarded",
        "inflated",
        "plain",
        "request",
        "services",
        "whose",
    )

    def __init__(self, services: Services, whose: object = None) -> None:
        """`whose`: the connection; what one has of the workers' threads is its share."""
        self.services = services
        self.request = InferRequest()
        self.forwarded: Forwarded | None = None  # headers that become parameters of the request
        self.whose = self.request if whose is None else whose
        self.plain = False  # its message is not compressed, or was inflated
        self.inflated = 0  # bytes that it has of the budget for inflating
        self._kept: Kept | None = None  # and those of held bytes that workers have taken
        self._body: Any = None
        self._inflater: Inflater | None = None

    # ------------------------------------------------------------ codecs say

    def inflater(self, body: Any) -> Inflater | None:
        """What inflates the message, None for one that is not compressed. Raises TritonError."""
        return None

    def refusal(self, body: Any, error: Undecodable | TooLong, most: int) -> TritonError:
        """The error for a message that is not what it says, or becomes more than `most` bytes."""
        raise NotImplementedError

    def begin(self, body: Any) -> None:
        """Called before decoding, with the plain message. Raises TritonError."""

    def slow(self, body: Any) -> bool:
        """Whether decoding takes long."""
        raise NotImplementedError

    def text_bytes(self, body: Any) -> int:
        """Bytes of the message of which a worker makes others, and does not say how many."""
        return len(body)

    def decode(self, body: Any, memory: Any, stop: Stop | None = None, reserve: Reserve = None) -> None:
        """Fills in the request. With `stop` a worker does it, and says how many bytes it needs. Raises TritonError."""
        raise NotImplementedError

    # ------------------------------------------------------------ steps

    def take(self, body: Any) -> bool:
        """Inflates and decodes a message; False: take_later() must do the rest. Raises TritonError."""
        made = self.inflater(body)
        if made is None:
            return self._take_plain(body)
        if len(body) <= INFLATED_HERE:
            try:
                if made.step(INFLATED_HERE, CALLS_HERE):
                    return self._take_plain(made.content)
            except (Undecodable, TooLong) as error:
                raise self.refusal(body, error, made.limit) from None
        self._body, self._inflater = body, made
        return False

    def _take_plain(self, body: Any) -> bool:
        self.plain = True
        self.begin(body)
        if self.slow(body):
            self._body = body
            return False
        self.decode(body, self.services.shared_memory)
        return True

    async def take_later(self) -> None:
        """What take() has left, by workers. Raises TritonError."""
        made, self._inflater = self._inflater, None
        if made is not None:
            try:
                content = await self.services.inflating.inflate(made, self.whose)
            except (Undecodable, TooLong) as error:
                raise self.refusal(self._body, error, made.limit) from None
            self.inflated = len(content)
            self._body = None
            if self._take_plain(content):
                return
        body, self._body = self._body, None
        memory = AskedFromThread(self.services.shared_memory)
        kept = self._kept = Kept(self.services.held)
        reserve = Reservation(kept.keep, self.text_bytes(body)).reserve
        await by_worker(self.services, lambda stop: self.decode(body, memory, stop, reserve), self.whose)

    def give_back(self) -> None:
        """Returns the bytes of the inflated message, and of tensors that workers made, to the server's budgets. To be called
        when the request is answered or dropped."""
        if self.inflated:
            self.services.inflating.release(self.inflated)
            self.inflated = 0
        if self._kept is not None:
            self._kept.over()

    def submit(self, responder: Responder) -> None:
        """Submits the decoded request. Raises TritonError."""
        if self.forwarded is not None:
            self.forwarded(self.request)
        self.request.responder = responder
        self.services.admission.submit(self.request)

    def read_wishes(self, headers: Callable[[], list[tuple[bytes, bytes]]], timing: bytes | None) -> None:
        """Takes over what the client asks of the server itself: a trace by `headers`, its times."""
        if self.services.admission.tracer.trace_headers:
            self.request.asked = asked(headers())
        if timing is not None:
            self.request.timing = wish(timing)


async def by_worker(services: Services, work: Callable[[Stop], T], whose: object) -> T:
    """What `work` returns, which a worker calls for `whose`. Raises what it raises. Cancellation: asks it to stop."""
    stop = Stop()
    try:
        return await services.workers.run(lambda: work(stop), whose)
    except BaseException:
        stop.ask()
        raise


async def select_later(
    services: Services, request: InferRequest, response: InferResponse, whose: object
) -> None:
    """select() by a worker. Raises what that raises. Cancellation: the worker finishes what it does."""
    memory = AskedFromThread(services.shared_memory)
    await services.workers.run(lambda: select(request, response, memory), whose)
