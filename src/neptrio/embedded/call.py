"""One request to a model of a server in the same process, from submission to its last response.

Rules:
 1. The methods of the Responder and what they call run on the server's trio thread; start(), cancel() and took() on
    any.
 2. The mail gets each response once, in order, then nothing more: the last is marked final, or is an exception.
 3. A decoupled model whose responses are not taken waits: AHEAD_BYTES may lie in the mail.
 4. The memory of the caller's arrays is in use until the final response has come.
 5. Whoever starts a call stands already where it will be cancelled: Ctrl-C comes between any two steps of a thread, and
    a request that nobody cancels would hold up the server's end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from neptrio.codec.outputs import select
from neptrio.embedded.mail import Mail
from neptrio.errors import Code, Internal, TritonError
from neptrio.foreign import text_of
from neptrio.loop.timers import Timer
from neptrio.request.back_pressure import let_send
from neptrio.request.infer_request import InferRequest, InferResponse, Responder, monotonic_ns

if TYPE_CHECKING:
    from neptrio.embedded.engine import Engine

log = logging.getLogger("neptrio.server")

AHEAD_BYTES = 1 << 20  # of responses that the caller has not taken; above it the model waits
ONE_RESPONSE = (
    "the model is decoupled: it may send any number of responses to a request; iterate over stream() instead"
)


class Call(Responder):
    """A request under way."""

    def __init__(
        self, engine: Engine, request: InferRequest, mail: Mail, one_response: bool, timeout: float | None
    ) -> None:
        """`timeout`: seconds from now until the call fails with Code.DEADLINE."""
        self._engine = engine
        self._request: InferRequest | None = request  # None at the end: it refers to this call
        self._mail = mail
        self._one_response = ONE_RESPONSE if one_response else None
        self._expires_ns = None if timeout is None else int(monotonic_ns()) + int(timeout * 1e9)
        self._timer: Timer | None = None
        self._ahead: float = 0
        self._room: list[Callable[[], None]] = []
        self._begun = False
        self._ended = False
        request.responder = self

    def start(self) -> None:
        """Has the server's thread submit the request. Raises Unavailable when the server has stopped."""
        self._engine.enter(self)
        self._engine.soon(self._begin)

    def _begin(self) -> None:
        """Submits the request. If it is refused, the mail gets the error."""
        request = self._request
        if request is None:
            return
        self._begun = True
        admission = self._engine.core.services.admission
        try:
            admission.find(request, self._one_response)
            admission.received(request, 0)
            admission.submit(request)
        except TritonError as error:
            self.fail(error)
            return
        except Exception as error:
            log.exception("submitting a request failed")
            self.fail(Internal(text_of(error)))
            return
        if self._expires_ns is not None and not self._ended:
            self._timer = self._engine.core.loop.timers.at(self._expires_ns, self._expire)

    def _expire(self) -> None:
        request = self._request
        self.fail(TritonError("the deadline of the request has passed", Code.DEADLINE))
        if request is not None:
            self._engine.core.services.admission.cancel(request)

    def fail(self, error: Exception) -> None:
        """Ends the call for its caller with an error."""
        if not self._ended:
            self._end()
            self._mail.put(error)

    def _end(self) -> None:
        self._ended = True
        self._request = None
        self._engine.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        self._make_room()

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if self._ended:
            return
        error: Exception | None = response.error
        if error is None and not response.null:
            try:
                select(request, response, self._engine.core.services)
            except TritonError as refused:
                error = refused.with_traceback(None)  # whose frames have the error
            except Exception as broken:
                error = Internal(text_of(broken))
        if error is not None and final:
            self.fail(error)
            return
        if final:
            self._end()
        else:
            self._ahead += self.size(response)
        self._mail.put((response if error is None else InferResponse(None, _as_error(error)), final))

    @staticmethod
    def size(response: InferResponse) -> int:
        """Bytes that a response counts for while it is not taken."""
        return sum(tensor.nbytes for tensor in response.outputs or ()) + 1024

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        if self._ended or self._ahead <= AHEAD_BYTES:
            return False
        self._room.append(callback)
        return True

    def took(self, response: InferResponse) -> None:
        """The caller has taken a response that was not the final one."""
        size = self.size(response)
        self._engine.soon(lambda: self._less(size))

    def _less(self, size: float) -> None:
        self._ahead -= size
        if self._ahead <= AHEAD_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, []
        let_send(room)

    def abandon(self) -> None:
        """The caller reads no more responses, and lets the request run: the model need not wait any more."""
        if not self._ended:
            self._engine.later(lambda: self._less(math.inf))

    def cancel(self) -> None:
        """Cancels the request if it has not ended: its caller reads no more responses."""
        if not self._ended:
            self._engine.later(self._cancel)

    def _cancel(self) -> None:
        request = self._request
        if request is not None:
            self._end()
            if self._begun:
                self._engine.core.services.admission.cancel(request)


def _as_error(error: Exception) -> TritonError:
    return error if isinstance(error, TritonError) else Internal(text_of(error))
