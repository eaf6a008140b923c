"""The process of an isolated model whose requests come over rings in shared memory.

Batches, responses and calls to other models cross on the rings. Rare messages use the socket: initialize, finalize,
logs, metrics, loading, and the descriptors of segments. What works on the memory itself is the "end" of the rings:
compiled for the server's Python (compiled_ring.py), or in Python for any other (plain_ring.py).

The main thread waits for batches. The answer to a call that it makes and waits for comes on the same ring; batches that
come before the answer are kept for later. A second thread takes cancellations, acknowledgements and the responses of
other calls, those of decoupled models among them: any thread may read them. With `async def execute` the main thread runs
the event loop, and a third thread passes batches to it.

Rules:
 1. Only one thread ever takes from the ring of batches: the main thread, or with an event loop the third.
 2. What comes on the other ring is handled by one thread at a time, in order: under `hearing`. It is taken before the lock
    of a channel, never the other way round.
 3. Nothing that is called under `hearing` waits: a call's `deliver` puts the response where another thread takes it. A model's own
    code may wait for what only an acknowledgement ends, in send().

What crosses on the socket may overtake what the server put into a ring before it. So `finalize` waits in the inbox
until LOOK comes on the ring of batches, behind the last ends of sequences.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

from .._execute import LOOP_STOPPED, answers, begun, failed_text, failure_text, listed
from .._request import InferenceRequest, InferenceResponse
from .._sender import Channel
from . import kinds, threads, tracing
from .child import Child
from .host import ChildHost

HEAR = 0  # in `finished`, beside the ids of requests (above) and of metrics (below)


def contexts(requests: list[InferenceRequest]) -> list[Any]:
    """The trace contexts of requests, None where there is none."""
    return [None if request._trace is None else request._trace.get_context() for request in requests]


class Back:
    """What a received request needs from the server: whether it is cancelled, and a sender (see _sender.Channel), which is
    made when the model first asks for one."""

    __slots__ = ("__weakref__", "cancelled", "channel", "child", "id", "names")

    def __init__(self, child: RingChild, id: int, names: Any) -> None:
        self.id = id
        self.names = names  # of the outputs that the client wants
        self.child = child
        self.cancelled = False
        self.channel: Channel | None = None
        if child.decoupled:
            self.channel = self._make()

    def sender(self, request: Any) -> Any:
        if self.channel is None:
            self.channel = self._make()
        return self.channel.sender(request)

    @property
    def taken(self) -> bool:
        return self.channel is not None and self.channel.taken

    @property
    def sent(self) -> bool:
        return self.channel is not None and self.channel.sent

    def set_together(self, together: bool) -> None:
        """Whether execute() works on the request and on others (decoupled models)."""
        if self.channel is not None:
            self.channel.together = together

    def close(self) -> None:
        """The request is answered without its sender, or executed again under another id."""
        if self.channel is not None:
            self.channel.close()
            self.child.open_ids.discard(self.id)  # a closed channel does not call finish()

    def is_cancelled(self) -> bool:
        child = self.child
        if not self.cancelled:
            child.hear()
            # the batch may have ended while the request's sender is still open
            self.cancelled = self.cancelled or self.id in child.cancelled
        return self.cancelled

    def _make(self) -> Channel:
        child, id, names = self.child, self.id, self.names
        known, read = child.cancelled, child.still_read
        known_here = child.open_ids
        known_here.add(id)

        def post(response: InferenceResponse | None, final: bool, size: int, handed_over: int) -> None:
            child.end.respond(id, response, names, final, size, handed_over)
            if final:
                known.discard(id)
                read.discard(id)
                known_here.discard(id)

        def cancelled() -> bool:  # under the channel's lock, which hear() may want
            return id in known

        def unread() -> bool:
            return id in known and id not in read

        def finish() -> None:
            known.discard(id)
            read.discard(id)
            known_here.discard(id)
            child.dropped.put(id)

        channel = Channel(post, cancelled, unread, finish, not child.decoupled)
        child.channels[id] = channel
        return channel


def make_back(child: RingChild) -> Any:
    """The function by which an end of the rings makes the way back of a request that it has received."""
    return lambda id, names: Back(child, id, names)


class RingChild(Child):
    """The process of a model whose requests cross in shared memory."""

    end: Any = None

    def make_end(self, memory: int, bell: int, rings: dict[str, Any]) -> Any:
        """Makes this process's end of the rings, as the server describes them."""
        raise NotImplementedError

    def host(self) -> ChildHost:
        return ChildHost(self)

    def prepare(self, message: dict[str, Any]) -> None:
        rings = message["rings"]
        memory, bell, *self.asking.lent = message["descriptors"]
        self.main = threading.get_ident()
        self.batch: int | None = None  # that the main thread executes
        # its message, its requests that are not answered, and when their execution began: see answer_first()
        self.message: Any = None
        self.given: list[InferenceRequest] = []
        self.began = 0
        self.channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()
        self.cancelled: set[int] = set()
        self.still_read: set[int] = set()  # those of the cancelled requests whose responses are still read
        self.calls: dict[int, Any] = {}
        self.aside: deque[Any] = deque()  # batches that came while the main thread waited for a call's answer
        self.under_way: dict[int, list[Back]] = {}
        self.taken = 0  # the number of the last batch that was taken; they come in order
        self.open_ids: set[int] = set()
        self.decoupled_calls: set[int] = set()  # those whose last response has not come
        self.came: dict[int, int] = {}
        self.coming = threading.Condition()
        self.dropped = self.finished
        self.hearing = threading.RLock()  # a model's finalizer may come in between, on the same thread
        self.end = self.make_end(memory, bell, rings)
        threads.start(self.hear_for_ever)  # initialize() may call other models

    # ------------------------------------------------------------ called by the ring's end

    def segment(self, number: int) -> int:
        """Waits for the descriptor of a segment that the server sends, and returns it."""
        with self.coming:
            while number not in self.came:
                self.coming.wait()
            return self.came.pop(number)

    def descriptors_came(self, message: dict[str, Any]) -> None:
        with self.coming:
            (self.came[message["k"]],) = message["descriptors"]
            self.coming.notify_all()

    def send_segment(self, descriptor: int, number: int, size: int) -> None:
        """Sends the server the descriptor of a segment that this process made."""
        self.wire.send({"t": "message_segment", "k": number, "size": size}, [descriptor])

    def leave(self) -> None:
        super().leave()
        if self.end is not None:
            self.end.leave()

    def catch_up(self) -> None:
        """Takes back memory that the server has returned. The caller may hold a channel's lock, so other messages are
        left to another thread."""
        if self.end.take_returns():
            self.finished.put(HEAR)

    # ------------------------------------------------------------ the second thread's ring

    def hear(self) -> None:
        """Handles the messages that wait on the second thread's ring. Any thread that holds no channel's lock."""
        end = self.end
        while end.has_control:
            with self.hearing:
                taken = end.take_control()
                if taken is None:  # they were memory, or another thread was faster
                    continue
                kind, id, message, length = taken
                if kind == kinds.CANCEL:
                    self._ring_cancel(id, bool(length))
                elif kind == kinds.ACKNOWLEDGE:
                    self._ring_acknowledge(id, length)
                elif kind == kinds.CALL_RESPONSE:
                    self._ring_response(id, message)
                taken = message = None

    def hear_for_ever(self) -> None:
        """Waits for and handles messages; the second thread runs it."""
        while True:
            self.end.wait_control()
            self.hear()

    def _ring_cancel(self, id: int, read: bool) -> None:
        number, place = id >> 20, id & 0xFFFFF
        early = number > self.taken  # read first: its batch may be taken, by the other thread, at any moment
        backs = self.under_way.get(number)
        if backs is not None and place < len(backs):
            backs[place].cancelled = True
        if early or backs is not None or id in self.open_ids:
            (self.still_read.add if read else self.still_read.discard)(id)
            self.cancelled.add(id)
        channel = self.channels.get(id)
        if channel is not None:
            channel.wake()

    def _ring_acknowledge(self, id: int, size: int) -> None:
        channel = self.channels.get(id)
        if channel is not None:
            channel.acknowledge(size)

    def _ring_response(self, key: int, message: Any) -> None:
        response, final, times = self.end.response(message)
        deliver = self.calls.pop(key, None) if final else self.calls.get(key)
        if final:
            self.decoupled_calls.discard(key)
        if deliver is None:
            return
        if times is None:
            deliver(response, final)
        else:
            deliver(response, final, times)

    def took(self, key: int) -> None:
        """Tells the server that the model took a response of a call to a decoupled model, which may send more."""
        if key in self.decoupled_calls:
            self.end.post(kinds.TOOK, key)

    def finish(self) -> None:
        """Does what may not be done where it was noticed: sends what finalizers (__del__) report, which must not block, and
        handles messages that were found where a lock was held. Runs on a thread of its own."""
        while True:
            id = self.finished.get()
            if id == HEAR:
                self.hear()
            elif id < 0:
                self.send({"t": "forget", "id": -id})
            elif self.end is not None:
                self.end.post(kinds.DROPPED, id)

    # ------------------------------------------------------------ the main thread

    def answer(self, key: int) -> Any:
        """Waits for the response to a call of the main thread, which is in no table. Batches that come before it are kept
        for later; the answer to an earlier call, for which nobody waits any more, is left."""
        end, answer = self.end, kinds.ANSWER
        while True:
            end.wait_answer()
            taken = end.take()
            if taken is None:
                continue
            if taken[0] != answer:
                self.aside.append(taken)
            elif taken[1] == key:
                response, final, _ = end.response(taken[2])
                if final or response is not None:
                    return response

    def begin(self) -> None:
        if self.loop is not None:
            threads.start(self._feed)

    def serve(self) -> None:
        if self.loop is not None:
            while True:  # it is never stopped but by the model
                self.loop.run_forever()
                self.loop_stopped = True
                print(LOOP_STOPPED, file=sys.stderr, flush=True)
        end = self.end
        aside = self.aside
        while True:
            if aside:
                taken = aside.popleft()
            else:
                taken = end.take()
                if taken is None:
                    end.wait()
                    continue
            kind, number, message, _ = taken
            taken = None
            if kind == kinds.BATCH:
                self._execute_ring(number, message)
            elif kind == kinds.SEQUENCE_END:
                id, reason = end.sequence_end(message)
                self._sequence_end({"c": id, "reason": reason})
            elif kind == kinds.LOOK:
                self._guarded(self._finalize, self.inbox.get())
                self._exit()
            message = None

    def _feed(self) -> None:
        """Passes what comes on the ring to the event loop, in line; the third thread runs it."""
        end, loop, look = self.end, self.loop, kinds.LOOK
        assert loop is not None
        while True:
            end.wait()
            while True:
                taken = end.take()
                if taken is None:
                    break
                if taken[0] == look:
                    loop.call_soon_threadsafe(self.dispatch, self.inbox.get())
                else:
                    loop.call_soon_threadsafe(self._spawn, taken)
                taken = None

    def _spawn(self, taken: Any) -> None:
        assert self.loop is not None
        kind, number, message, _ = taken
        if kind == kinds.BATCH:
            task = self.loop.create_task(self._execute_ring_async(number, message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif kind == kinds.SEQUENCE_END:
            id, reason = self.end.sequence_end(message)
            self.dispatch({"t": "sequence_end", "c": id, "reason": reason})

    def _taken(self, number: int, message: Any) -> list[InferenceRequest]:
        given: list[InferenceRequest] = self.end.requests(number, message)
        self.under_way[number] = [request._channel for request in given]
        self.taken = number  # must come second: _ring_cancel() reads the two in the other order
        if self.end.has_control:
            self.hear()
        return given

    def _left(self, number: int) -> None:
        for back in self.under_way.pop(number, ()):
            if back.id not in self.open_ids:
                self.cancelled.discard(back.id)
                self.still_read.discard(back.id)

    def answer_first(self, count: int, responses: Any) -> None:
        """See Host.answer_first(). The main thread, in execute()."""
        executed = time.monotonic_ns()
        given, number = self.given[:count], self.batch
        times = getattr(responses, "times", None) or (self.began, self.began, executed)
        found = self._answers(given, responses)
        self.given = self.given[count:]
        self.end.part(number, *times, time.monotonic_ns(), found, self._failed_text, self.message)
        self.began = time.monotonic_ns()

    def _execute_ring(self, number: int, message: Any) -> None:
        began = made = executed = time.monotonic_ns()
        given: list[InferenceRequest] = []
        self.batch = number
        try:
            given = self.given = self._taken(number, message)
            self.message = message
            made = executed = self.began = time.monotonic_ns()
            if self.decoupled and len(given) > 1:
                begun(given)
            span = tracing.enter(contexts(given))
            try:
                responses = self.model.execute(given)
            finally:
                tracing.leave(span)
                if self.given is not given:  # the first have their answers
                    given = self.given
                    began = made = self.began
            executed = time.monotonic_ns()
            began, made, executed = getattr(responses, "times", None) or (began, made, executed)
            found = self._answers(given, responses)
            responses = None
            self._left(number)
            self.end.result(
                number, began, made, executed, time.monotonic_ns(), found, self._failed_text, message
            )
        except BaseException as error:
            self._ring_failed(number, given, error, began, made, executed)
        finally:
            self.batch = self.message = None
            self.given = []

    async def _execute_ring_async(self, number: int, message: Any) -> None:
        began = made = executed = time.monotonic_ns()
        given: list[InferenceRequest] = []
        try:
            given = self._taken(number, message)
            made = executed = time.monotonic_ns()
            if self.decoupled and len(given) > 1:
                begun(given)
            tracing.enter(contexts(given))  # of this task; it ends with it
            responses = await self.model.execute(given)
            executed = time.monotonic_ns()
            began, made, executed = getattr(responses, "times", None) or (began, made, executed)
            found = self._answers(given, responses)
            responses = None
            self._left(number)
            self.end.result(
                number, began, made, executed, time.monotonic_ns(), found, self._failed_text, message
            )
        except BaseException as error:
            self._ring_failed(number, given, error, began, made, executed)

    def _ring_failed(
        self,
        number: int,
        given: list[InferenceRequest],
        error: BaseException,
        began: int,
        made: int,
        executed: int,
    ) -> None:
        for request in given:
            request._channel.close()
        self._left(number)
        self.end.failure(number, began, made, executed, time.monotonic_ns(), failure_text(self.name, error))

    def _failed_text(self, reason: str) -> str:
        return failed_text(self.name, reason)

    def _answers(self, given: list[InferenceRequest], responses: Any) -> list[Any]:
        """The answers of a batch, in the form that the ring's end sends."""
        returned = listed(responses, given, self.name, self.decoupled)

        def made(place: int, response: InferenceResponse) -> Any:
            return response, given[place]._channel.names

        return answers(given, returned, self.name, self.decoupled, made)
