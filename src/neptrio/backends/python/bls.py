"""Business logic scripting: a model's requests to other models.

A model may call from any thread. The call is posted to the trio thread as a work item (in_process_host.py) and submitted there
like a client's request. A responder passes its responses to the thread or event loop that waits.

Rules:
 1. The request's inputs use the memory of the caller's arrays. If the other model may write to them, it gets copies, so
    the arrays do not change. The caller must not change them until the answer has come.
 2. A call is made for a request that the model executes, if that is known: the one whose trace the call carries, or
    else the only request of the batch. If that request is cancelled, the call is cancelled too.
 3. A call that would wait for itself is refused at once. That is the case when each instance that could execute it
    waits, directly or through other calls, for the instance that makes it. It is looked for again when an instance's next
    process could not be started.
 4. A call that comes when the server has ended gets an error: a thread of the model's may outlive the instance.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import triton_python_backend_utils as utils
from neptrio.backends.python import convert
from neptrio.codec.outputs import select
from neptrio.errors import Internal, TritonError, Unavailable
from neptrio.execution.admission import Absent
from neptrio.execution.batch import Batch
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.loop.mailbox import WorkItem
from neptrio.request.back_pressure import let_send
from neptrio.request.infer_request import InferRequest, InferResponse, Responder

log = logging.getLogger("neptrio.python")
AHEAD_BYTES = 1 << 20  # bytes of responses not yet taken by the calling model; above it the called one waits

STOPPED = "the server has stopped"

# instance -> the call that its thread waits for; on the trio thread
waits: dict[Any, Call] = {}
current_batch: ContextVar[Batch | None] = ContextVar("neptrio_python_batch", default=None)


class OnLoop(WorkItem):
    """A function to be called on the trio thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


def _instances(model: Any) -> list[Any]:
    """The instances of a model that a call is made to; none while it is still loaded on demand."""
    return [] if isinstance(model, Absent) else list(model.pool.instances)


def refuse_circles() -> None:
    """An instance gets no more batches for now: refuses the calls that wait for themselves without it. Trio thread."""
    for call in list(waits.values()):
        call.refuse_circle()


def _nobody(response: Any, final: bool) -> None:
    """Nobody waits for more responses."""


class Followers:
    """What is to hear that a request was cancelled: who was told so far, and the calls that are made for it.

    It is the request's `on_cancel`. A call leaves with its last response, so that there are no more than are under way,
    however many a model makes. It is held weakly: it holds its request, and that its parent, which holds this object.
    """

    def __init__(self, before: Callable[[], object] | None) -> None:
        self._before = before
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()

    def add(self, call: Call) -> None:
        """Tells a call from now on."""
        self._calls[id(call)] = call

    def remove(self, call: Call) -> None:
        """Tells a call no more."""
        self._calls.pop(id(call), None)

    def __call__(self) -> None:
        if self._before is not None:
            self._before()
        for call in list(self._calls.values()):  # in order; each may end while it is told
            call._drop()


class Call(Responder):
    """One request to another model, from submission to its last response.

    `instance` is the instance whose thread is blocked until the response comes, None if none is.
    """

    def __init__(
        self,
        services: ModelHost,
        request: InferRequest,
        decoupled: bool,
        deliver: Callable[[Any, bool], None],
        instance: Any,
    ) -> None:
        self._instance = instance
        self._services = services
        self._request = request
        self._decoupled = decoupled
        self._deliver = deliver
        self._ahead = 0
        self._sizes: deque[int] = deque()  # of the responses that wait, in order
        self._room: list[Callable[[], None]] = []
        self._followed: Followers | None = None  # of the request that this one is cancelled with
        self._circle = False
        request.responder = self

    def submit(self) -> None:
        """Submits the request; if it is refused, delivers the error as its response. Trio thread."""
        request = self._request
        try:
            parent = request.parent
            if parent is not None:
                if parent.cancelled:
                    raise TritonError("request cancelled", code=convert.CODES[utils.TritonError.CANCELLED])
                self._follow(parent)
            one_response = f"model '{request.model_name}' is decoupled; call exec(decoupled=True) and iterate over its responses"
            model = self._services.admission.find(request, None if self._decoupled else one_response)
            if self._instance is not None:
                waits[self._instance] = self
                instances = _instances(model)
                if instances and (instances[0] in waits or instances[0].away) and self._never_ends({self}):
                    raise self._circular()
                self._instance.backend.blocked = True
            self._services.foreign_inputs.submit(self._services.admission, request, self._refused)
        except TritonError as error:
            self._refused(error)

    def _refused(self, error: Exception) -> None:
        """The request was not accepted: the error is its response."""
        if not isinstance(error, TritonError):
            log.error("a call of model '%s' could not be made", self._request.model_name, exc_info=error)
            error = Internal(text_of(error))
        self._resumed()
        self._hand(self.receive(InferResponse(None, error)), True)

    def lost(self) -> None:
        """There is no trio thread any more that could submit the request. Any thread."""
        self._hand(self.receive(InferResponse(None, Unavailable(STOPPED))), True)

    def _hand(self, response: Any, final: bool) -> None:
        """Delivers a response to whoever waits for it. After the last one nothing refers back to this call: neither who
        waited, nor the request."""
        self._deliver(response, final)
        if final:
            if self._followed is not None:
                self._followed.remove(self)
                self._followed = None
            self._deliver = _nobody
            self._request.responder = None  # type: ignore[assignment]

    def receive(self, response: InferResponse) -> Any:
        """Converts a response to the form that `deliver` expects."""
        return convert.received(response)

    def _circular(self) -> TritonError:
        assert self._instance is not None
        return Unavailable(
            f"the request of '{self._instance.name}' to model '{self._request.model_name}' would wait for "
            "itself: every instance of that model waits for this one; give it more instances, or "
            "await async_exec in an async execute()"
        )

    def refuse_circle(self) -> None:
        """Cancels the request if it waits for this call to end (rule 3)."""
        if self._request.batch is None and self._never_ends({self}):
            self._circle = True
            self._services.admission.cancel(self._request)

    def _never_ends(self, seen: set[Call]) -> bool:
        """True if every instance that could execute the request waits, in a circle, for this call (rule 3)."""
        request = self._request
        if request.batch is not None:
            instances = [request.batch.instance]
        else:
            instances = _instances(request.model)
        for instance in instances:
            call = waits.get(instance)
            if call is None:
                if instance.away and not instance.backend.returning:  # nothing waits for it
                    continue
                return False
            if call not in seen:
                seen.add(call)
                if not call._never_ends(seen):
                    return False
        return bool(instances)

    def _resumed(self) -> None:
        if self._instance is not None and waits.get(self._instance) is self:
            del waits[self._instance]
            self._instance.backend.blocked = False

    def _follow(self, parent: InferRequest) -> None:
        """Cancels this request when its parent is cancelled."""
        followers = parent.on_cancel
        if not isinstance(followers, Followers):
            followers = parent.on_cancel = Followers(followers)
        followers.add(self)
        self._followed = followers

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if final:
            self._resumed()
        if self._circle:
            response = InferResponse(None, self._circular())
        try:
            if response.null:
                self._hand(None, final)
                return
            if response.error is None:
                select(request, response, self._services)
            made = self.receive(response)
            if self._decoupled:  # others send one response
                size = sum(tensor.nbytes for tensor in response.outputs or ()) + 1024
                self._ahead += size
                self._sizes.append(size)
            self._hand(made, final)
        except Exception as error:
            log.exception("a response could not be handed to the model that asked for it")
            self._hand(self.receive(InferResponse(None, Internal(text_of(error)))), final)

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        if self._ahead <= AHEAD_BYTES or self._unread:
            return False
        self._room.append(callback)
        return True

    @property
    def _unread(self) -> bool:
        return bool(self._request.cancelled and not self._request.still_read)

    def took(self, response: Any) -> None:
        """Called when the model has taken the oldest waiting response. Any thread."""
        size = self._sizes.popleft() if self._sizes else 0
        if self._decoupled:
            self._services.completions.post(OnLoop(lambda: self._less(size)))

    def took_here(self) -> None:
        """The same as took(), for a decoupled model's response and on the trio thread."""
        self._less(self._sizes.popleft() if self._sizes else 0)

    def _less(self, size: int) -> None:
        self._ahead -= size
        if self._ahead <= AHEAD_BYTES or self._unread:
            room, self._room = self._room, []
            let_send(room)

    def cancel(self) -> None:
        """Cancels the request. With `decoupled`, the calling model goes on reading its responses. Any thread."""
        self._services.completions.post(OnLoop(self._cancel))

    def drop(self) -> None:
        """Cancels the request, when the calling model reads no more of its responses. Any thread."""
        self._services.completions.post(OnLoop(self._drop))

    def _cancel(self) -> None:
        request = self._request
        if not request.cancelled:
            request.still_read = self._decoupled
            if request.model is not None:
                self._services.admission.cancel(request)
        self._less(0)

    def _drop(self) -> None:
        request = self._request
        if (
            request.still_read
        ):  # it was cancelled: its model is told once more, that its senders go nowhere now
            request.still_read = False
            if request.on_cancel is not None:
                request.on_cancel()
        elif request.model is not None:
            self._services.admission.cancel(request)
        self._less(0)
