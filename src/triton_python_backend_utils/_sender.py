"""The response sender: 0 to n responses to one request, from any thread.

Rules:
 1. After the response with TRITONSERVER_RESPONSE_COMPLETE_FINAL nothing may be sent.
 2. send() blocks while the client has too much unread, so that a slow client stops the model's thread instead of
    filling the server's memory. Coroutines await async_send() instead. It never blocks on less than UNTOLD_BYTES, or it
    might wait for a word that does not come.
 3. When the request is cancelled and its responses are not read, sending data raises; errors and the final flag may
    still be sent. While execute() works on other requests too, data is dropped instead: what is raised there fails them all. A
    model that is not decoupled may always send its one response. One that cancels a call and goes on reading gets all responses.
 4. If a sender is deleted before it has sent the final flag, its request fails, so that it does not stay open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _checks
from ._errors import TritonModelException
from ._request import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse

WINDOW_BYTES = 1 << 20  # of responses that the server has not passed on to the client yet
# less than this may be passed on and the sender not told, who may have to be woken up for that
UNTOLD_BYTES = WINDOW_BYTES // 2
RESPONSE_OVERHEAD = 1024  # bytes that a response counts for, besides its tensors

if TYPE_CHECKING:
    import asyncio  # only coroutines import it, because it takes time


def _size(array: Any) -> int:
    """The size of a tensor in bytes; nbytes of an object array would count only its references."""
    if array.dtype.kind != "O":
        return int(array.nbytes)
    return sum(4 + len(element) for element in array.flat if isinstance(element, (str, bytes)))


class Channel:
    """Sends a received request's responses to the server. One per request, shared by the request and its senders."""

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_finish",
        "_lock",
        "_outstanding",
        "_post",
        "_room",
        "_single",
        "_unread",
        "_waiters",
        "closed",
        "taken",
        "together",
    )

    def __init__(
        self,
        post: Callable[[InferenceResponse | None, bool, int, int], None],
        cancelled: Callable[[], bool],
        unread: Callable[[], bool],
        finish: Callable[[], None],
        single: bool,
    ) -> None:
        self._post = post  # post(response, final, size, handed over) hands it on; acknowledge(size) answers
        self._cancelled = cancelled
        self._unread = unread  # cancelled, and its responses are not read
        self._finish = finish  # called when the channel is dropped while open
        self._single = single  # exactly one response (the model is not decoupled)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._outstanding = 0
        self.taken = False
        self.closed = False
        self.together = False  # execute() works on it and on others

    def is_cancelled(self) -> bool:
        return self._cancelled()

    def sender(self, request: Any) -> InferenceResponseSender:
        self.taken = True
        return InferenceResponseSender(self)

    def _begin(self, response: InferenceResponse | None, flags: int) -> tuple[bool, int, bool]:
        """Checks a send. Returns (final, size, droppable)."""
        flags = _checks.number(flags, "flags of send()", 0, (1 << 32) - 1)
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag value: {flags!r}, expected 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and not final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to "
                "zero. (The TRITONSERVER_RESPONSE_COMPLETE_FINAL flag was not set)"
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise _checks.wrong("response of send()", "an InferenceResponse", response)
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        size = RESPONSE_OVERHEAD
        data = response is not None and not response.has_error()
        if response is not None:
            for tensor in response.output_tensors():
                size += _size(tensor.as_numpy()) if tensor.is_cpu() else tensor._source.nbytes
        return final, size, data and not final and not self._single

    def _blocked(self, size: int) -> bool:
        room = WINDOW_BYTES - min(size, WINDOW_BYTES - UNTOLD_BYTES)
        return not self._single and self._outstanding > room

    def _drop(self) -> None:
        """What nobody will read is not sent: rule 3."""
        if self.closed or not self.together:
            raise TritonModelException(
                "Unable to send response. The request was cancelled: nobody will read it."
            )

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        handed_over = time.monotonic_ns()  # from here on it is the response's output, not its computation
        final, size, data = self._begin(response, flags)
        with self._room:
            while data and self._blocked(size) and not self.closed and not self._unread():
                self._room.wait()
            if data and self._unread():
                self._drop()
            else:
                self._hand_on(response, final, size, handed_over)

    async def async_send(self, response: InferenceResponse | None, flags: int) -> None:
        import asyncio

        handed_over = time.monotonic_ns()
        final, size, data = self._begin(response, flags)
        while True:
            with self._lock:
                if data and self._unread():
                    self._drop()
                    return
                if not data or self.closed or not self._blocked(size):
                    self._hand_on(response, final, size, handed_over)
                    return
                loop = asyncio.get_running_loop()
                room = loop.create_future()
                self._waiters.append((loop, room))
            await room

    def _hand_on(self, response: InferenceResponse | None, final: bool, size: int, handed_over: int) -> None:
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self._single:
            if response is None and not self._outstanding:
                raise TritonModelException(
                    "Unable to send response. A model that is not decoupled must send one response with data or an error"
                )
            if self._outstanding and response is not None:
                raise TritonModelException(
                    "Unable to send response. A model that is not decoupled sends exactly one response per request"
                )
            self.closed = final
            if response is not None:
                self._outstanding += size
                self._post(response, True, size, handed_over)
            return
        self._post(
            response, final, size, handed_over
        )  # raises for one that cannot be sent: the model may send another
        self.closed = final
        self._outstanding += size
        if final:  # which need not be acknowledged
            self._wake()

    def acknowledge(self, size: int) -> None:
        """Called when the server has passed on `size` more bytes, so that there is room. It need not be for what comes last: less than
        UNTOLD_BYTES, and the final response. Any thread."""
        with self._room:
            if not self._single:
                self._outstanding -= size
            self._wake()

    def close(self) -> None:
        """Nothing more may be sent: the request is answered in another way. Senders that wait for room raise. Any thread."""
        with self._room:
            self.closed = True
            self._wake()

    def wake(self) -> None:
        """Called when the request was cancelled: wakes senders that wait for room. Any thread."""
        with self._room:
            self._wake()

    def _wake(self) -> None:
        self._room.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, room in waiters:
            try:
                loop.call_soon_threadsafe(_resolve, room)
            except RuntimeError:  # that loop has ended, and its coroutine with it
                pass

    @property
    def sent(self) -> bool:
        """The one response was sent (models that are not decoupled)."""
        return self._single and self._outstanding > 0

    def __del__(self) -> None:
        if not self.closed and not self.sent:
            self._finish()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InferenceResponseSender:
    """Sends the responses of one request."""

    __slots__ = ("__weakref__", "_channel")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response; waits while the client has too much unread.

        `flags` is TRITONSERVER_RESPONSE_COMPLETE_FINAL for the last one, which may be None.
        Raises TritonModelException after the final one, and for data once the request is cancelled.
        """
        self._channel.send(response, flags)

    async def async_send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """send() for coroutines: waits without blocking the event loop."""
        await self._channel.async_send(response, flags)

    def is_cancelled(self) -> bool:
        """True when the client has cancelled the request or disconnected."""
        return self._channel.is_cancelled()
