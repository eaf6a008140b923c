"""The model's end of the rings for an interpreter that cannot load the server's compiled modules.

It does what cext/rings/model_side.pyx does, whose text says who owns what, with Python's struct for messages and a small
library without Python (cext/rings/plain_ring.c) for the rings, so any version from 3.8 with numpy will do. Kinds of
messages and their form: kinds.py.

It is simpler in one thing: tensors are copied into the shared memory with every response, also where a model
returns an input as it is.

Rules:
 1. Calls of the library hold the GIL, so each is one step for all threads and finalizers.
 2. A finalizer only pushes, or notes in `unsaid` what found no room. Everything that takes `_lock` is called by threads
    that do not hold it: finalizers never take it.
 3. To take from the second thread's ring and to put it at the end of `_heard` is one step, under `_taking`. From there, one
    thread at a time takes and handles them (hear() of ring_child.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import deque
from typing import Any

from .._errors import ErrorCode, TritonError, TritonModelException
from .._execute import OPEN_ANSWER, RESCHEDULED_ANSWER
from .._foreign import text_of
from .._host import FORKED
from .._request import InferenceRequest, InferenceResponse, InferenceTrace
from .._tensor import Tensor
from .kinds import (
    BLOCKING,
    CALL,
    CONTEXT,
    DECOUPLED,
    END,
    ERROR,
    FINAL,
    HERE,
    KEEP_ABOVE,
    LABELLED,
    NAMES,
    NULL_RESPONSE,
    OPEN,
    PARAMETERS,
    PARENT,
    REQUEST_BITS,
    RESCHEDULED,
    RESPONSE,
    RESULT,
    RETURN,
    SEND,
    START,
    TEXT_ID,
    TOP,
    TRACED,
)
from .plain_messages import (
    ALIGN,
    FULL_SECONDS,
    PLACE,
    REQUEST,
    TIMES,
    Entry,
    Extents,
    GivenMessage,
    InputBytes,
    Memory,
    MessageWriter,
    Reader,
    RingEnd,
    input_array,
)
from .reserved import sealed_memory


class PlainSide:
    """See the module's text. `links` sends segments over the socket and knows those that came."""

    def __init__(
        self,
        library: str,
        fd: int,
        bell: int,
        layout: dict[str, int],
        links: Any,
        channel: Any,
        model_name: str,
        model_version: int,
        output_names: list[str],
        read_only: bool,
    ) -> None:
        self._library = ctypes.PyDLL(library)
        self._library.plain_head.restype = ctypes.c_uint64
        self._wait = ctypes.CDLL(library).plain_wait  # without the GIL
        self.memory = Memory(fd, layout["size"])
        os.close(fd)
        base = self.memory.address
        self._work = RingEnd(base + layout["work"], layout["work_entries"], 0)
        self._control = RingEnd(base + layout["control"], layout["control_entries"], 0)
        self._answers = RingEnd(base + layout["done"], layout["done_entries"], 0)
        self._extents = Extents(layout["outputs"], layout["area"])
        self._lock = threading.Lock()  # of what follows
        self._passing: deque[tuple[int, int, int]] = (
            deque()
        )  # (place in the ring, offset, size): free once it is past
        self._lent: dict[int, int] = {}  # offset -> size of messages that the server looks at where they lie
        self._returned: deque[int] = deque()  # offsets of those that it looks at no more
        self._taking = threading.RLock()  # a finalizer may come in between, on the same thread
        self._heard: deque[GivenMessage] = deque()
        self._unsaid: list[int] = []
        self._left = False  # this is a process that the model has forked
        self._number = 0
        self._bell = bell
        self.links = links
        self._channel = channel
        self._model_name = model_name
        self._model_version = model_version
        self._output_names = output_names
        self.read_only = read_only

    # ------------------------------------------------------------ taking

    def wait(self) -> bool:
        """Sleeps until the main thread's ring holds something; False after a signal."""
        return self._wait(ctypes.byref(self._work)) > 0

    wait_answer = wait  # this interpreter takes longer to ask than to fall asleep

    def wait_control(self) -> bool:
        """Sleeps until the second thread's ring holds something; False after a signal."""
        return self._wait(ctypes.byref(self._control)) > 0

    def _take(self, ring: RingEnd) -> GivenMessage | None:
        """The next of a ring, which may copy it: only then is it passed. A finalizer that runs while it is copied may have taken it
        itself."""
        entry = Entry()
        while True:
            own = ctypes.c_uint64(ring.own)
            if self._library.plain_peek(ctypes.byref(ring), ctypes.byref(entry)) <= 0:
                return None
            message = GivenMessage(self, entry) if entry.kind != RETURN else None
            if not self._library.plain_advance(ctypes.byref(ring), own):
                if message is not None:
                    message.lender = None  # whoever has taken it returns it
                continue
            if message is not None:
                return message
            self._returned.append(entry.offset)

    def take(self) -> Any:
        """The next of the main thread's ring as (kind, id, message, length), or None."""
        message = self._take(self._work)
        if message is None:
            return None
        message.reach()
        return message.kind, message.id, message if message.size else None, message.length

    def take_control(self) -> Any:
        """The next of the second thread's ring as (kind, id, message, length), or None. One thread at a time."""
        self.take_returns()
        if not self._heard:
            return None
        message = self._heard.popleft().reach()
        return message.kind, message.id, message if message.size else None, message.length

    def take_returns(self) -> bool:
        """Empties the second thread's ring and takes memory back that the server has returned. True when something else
        waits to be handled, which take_control() gives. Any thread."""
        if self._left:
            return False
        with self._taking:
            while True:
                message = self._take(self._control)
                if message is None:
                    return len(self._heard) > 0
                self._heard.append(message)

    @property
    def has_control(self) -> bool:
        """Something waits in the second thread's ring, or was taken from it and is not handled."""
        return not self._left and (
            len(self._heard) > 0 or bool(self._library.plain_waiting(ctypes.byref(self._control)))
        )

    def requests(self, number: int, message: GivenMessage) -> list[InferenceRequest]:
        """What execute() is called with."""
        reader = Reader(message)
        made = []
        for place in range(reader.u32()):
            request = InferenceRequest.__new__(InferenceRequest)
            flags, inputs, request._timeout = reader.unpack(REQUEST)
            request._correlation_id = reader.text() if flags & TEXT_ID else reader.u64()
            request._request_id = reader.text()
            trace = InferenceTrace(number << REQUEST_BITS | place) if flags & TRACED else None
            if trace is not None:
                trace._id, trace._parent = reader.u64(), reader.u64()
                trace._context = reader.text() if flags & CONTEXT else None
            request._parameters = json.loads(reader.text()) if flags & PARAMETERS else None
            wanted = None
            names = list(self._output_names)
            if flags & NAMES:
                count, extra = reader.u32(), reader.u32()
                wanted = [reader.text() for _ in range(count)]
                names = wanted[: count - extra]
            request._requested_output_names = names
            id = number << REQUEST_BITS | place
            request._trace = trace
            request._flags = flags & (START | END)
            request._model_name = self._model_name
            request._model_version = self._model_version
            request._preferred_memory = None
            request._release_flags = 1
            request._channel = self._channel(id, wanted)
            request._inputs = self._tensors(reader, message, inputs)
            made.append(request)
        return made

    def _tensors(self, reader: Reader, message: GivenMessage, count: int) -> list[Tensor]:
        data = message.address + (message.size + ALIGN - 1) // ALIGN * ALIGN
        made = []
        for _ in range(count):
            name = reader.text()
            dtype, dimensions = reader.u32(), reader.u32()
            shape = tuple(reader.u64() for _ in range(dimensions))
            place, offset, size = reader.unpack(PLACE)
            address = (data if place == HERE else self.memory.address) + offset
            source = InputBytes(message, address, size, dtype, shape, self.read_only)
            made.append(Tensor._over(name, dtype, shape, source, input_array, False))
        return made

    def response(self, message: GivenMessage) -> tuple[InferenceResponse | None, bool, None]:
        """(InferenceResponse or None, final, None) of a response of another model: no times, for which only compiled backends ask."""
        reader = Reader(message)
        flags = reader.u32()
        if flags & NULL_RESPONSE:
            return None, bool(flags & FINAL), None
        how, text = reader.u32(), reader.text()
        parameters = json.loads(text) if text else None
        if how == ERROR:
            text = reader.text()
            made = InferenceResponse([], TritonError(text, ErrorCode(reader.u32())), parameters)
        else:
            made = InferenceResponse(self._tensors(reader, message, reader.u32()), None, parameters)
        return made, bool(flags & FINAL), None

    def sequence_end(self, message: GivenMessage) -> tuple[Any, str]:
        """(correlation id, reason)."""
        reader = Reader(message)
        id: Any = reader.text() if reader.u32() else reader.u64()
        return id, reader.text()

    # ------------------------------------------------------------ saying

    def _push_now(self, entry: Entry) -> int:
        return int(self._library.plain_push(ctypes.byref(self._answers), ctypes.byref(entry)))

    def leave(self) -> None:
        """This is a process that the model has forked: the rings are its parent's, and nothing here touches them."""
        self._left = True

    def release(self, offset: int) -> None:
        """Nothing looks at a message of the server any more. Never blocks, wakes nobody."""
        if self._left:
            return
        if self._push_now(Entry(RETURN, 0, 0, offset, 0)) <= 0:
            self._unsaid.append(offset)

    def _push(self, entry: Entry) -> int:
        """Pushes, waiting for room, and where the server sleeps rings. Returns how many entries were pushed, ever."""
        if self._left:
            raise TritonModelException(FORKED)
        while self._unsaid:
            try:
                offset = self._unsaid.pop()
            except IndexError:  # another thread was faster
                break
            if self._push_now(Entry(RETURN, 0, 0, offset, 0)) <= 0:
                self._unsaid.append(offset)
                break
        while True:
            done = self._push_now(entry)
            if done > 0:
                break
            if done < 0:
                raise RuntimeError("the ring to the server is broken: something wrote over the shared memory")
            self._ring()
            time.sleep(FULL_SECONDS)
        pushed = int(self._answers.own)
        self._ring()
        return pushed

    def _ring(self) -> None:
        if self._library.plain_must_wake(ctypes.byref(self._answers)):
            try:
                os.write(self._bell, b"\1\0\0\0\0\0\0\0")
            except BlockingIOError:
                pass  # its counter is full: the server is told already

    def post(self, kind: int, id: int, length: int = 0) -> None:
        """Pushes a descriptor without a message."""
        self._push(Entry(kind, 0, id, 0, length))

    def _room(self, size: int) -> int:
        """An offset for a message of `size` bytes, -1 when there is no room for it. With the lock."""
        self._take_back()
        return self._extents.take(size)

    def _take_back(self) -> None:
        """Takes back what the server is done with. With the lock."""
        head = int(self._library.plain_head(ctypes.byref(self._answers)))
        while self._passing and self._passing[0][0] <= head:
            self._extents.give(*self._passing.popleft()[1:])
        while self._returned:
            offset = self._returned.popleft()
            size_of = self._lent.pop(offset, 0)
            if size_of:
                self._extents.give(offset, size_of)

    def _send(self, kind: int, id: int, writer: MessageWriter) -> None:
        if self._left:
            raise TritonModelException(FORKED)
        own = len(writer.own)
        total = (own + ALIGN - 1) // ALIGN * ALIGN + writer.data
        with self._lock:
            offset = self._room(total)
        if offset < 0:
            self.links.catch_up()
            with self._lock:
                offset = self._room(total)
                self._number += 1
                number = self._number
        if offset < 0:
            fd = sealed_memory("model-message", total)
            try:
                writer.copy(Memory(fd, total).array)
                self.links.send_segment(fd, number, total)
            finally:
                os.close(fd)
            with self._lock:
                self._lent[TOP | number] = 0  # nothing of the area
            self._push(Entry(kind, own, id, TOP | number, total))
            return
        writer.copy(self.memory.array[offset : offset + total])
        if total > KEEP_ABOVE:
            with self._lock:
                self._lent[offset] = total
            self._push(Entry(kind, own, id, offset, total))
        else:
            pushed = self._push(Entry(kind, own, id, offset, total))
            with self._lock:
                self._passing.append((pushed, offset, total))

    def result(
        self,
        number: int,
        began: int,
        made: int,
        executed: int,
        packed: int,
        answers: list[Any],
        failed: Any,
        given: GivenMessage,
    ) -> None:
        """Sends a batch's answers: (InferenceResponse, wanted names), OPEN_ANSWER or RESCHEDULED_ANSWER each.

        `failed(text)` words the error of a response that cannot be sent; `given` is the batch's message.
        """
        writer = MessageWriter()
        writer.own += TIMES.pack(began, made, executed, packed)
        writer.u32(0)
        writer.u32(len(answers))
        for answer in answers:
            if answer is OPEN_ANSWER:
                writer.u32(OPEN)
            elif answer is RESCHEDULED_ANSWER:
                writer.u32(RESCHEDULED)
            elif isinstance(answer, str):
                writer.error(answer, 1)
            else:
                before = writer.mark()
                try:
                    self._pack_response(writer, *answer)
                except Exception as problem:
                    writer.back_to(before)
                    writer.error(failed(f"cannot use an output tensor: {text_of(problem)}"), 1)
        self._send(RESULT, number, writer)

    def failure(self, number: int, began: int, made: int, executed: int, packed: int, text: str) -> None:
        """Sends that a whole batch failed."""
        writer = MessageWriter()
        writer.own += TIMES.pack(began, made, executed, packed)
        writer.u32(1)
        writer.text(text)
        self._send(RESULT, number, writer)

    def respond(
        self, id: int, response: Any, names: Any, final: bool, size: int, handed_over: int = 0
    ) -> None:
        """Sends a response of a sender, which the model handed over at that time (0: it does not matter). Raises what
        a tensor that cannot be sent raises."""
        writer = MessageWriter()
        writer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        writer.u64(size)
        writer.u64(handed_over)
        if response is not None:
            self._pack_response(writer, response, names)
        self._send(SEND, id, writer)

    def call(self, key: int, request: Any, decoupled: bool, blocking: bool, parent: Any, batch: int) -> None:
        """Sends a request to another model."""
        writer = MessageWriter()
        id = request._correlation_id
        flags = request._flags & (START | END)
        flags |= TEXT_ID if isinstance(id, str) else 0
        flags |= DECOUPLED if decoupled else 0
        flags |= BLOCKING if blocking else 0
        flags |= 0 if parent is None else PARENT
        version = request._model_version
        writer.u32(flags | LABELLED if isinstance(version, str) else flags)
        writer.text(request._model_name)
        if isinstance(version, str):
            writer.text(version)
        else:
            writer.u64(0 if version < 0 else version + 1)
        writer.text(str(request._request_id))
        writer.u64(int(request._timeout))
        if isinstance(id, str):
            writer.text(id)
        else:
            writer.u64(id)
        writer.u64(parent or 0)
        writer.u64(batch)
        writer.text(json.dumps(request._parameters) if request._parameters else "")
        writer.u32(len(request._requested_output_names))
        for name in request._requested_output_names:
            writer.text(name)
        writer.u32(len(request._inputs))
        for tensor in request._inputs:
            writer.tensor(tensor)
        self._send(CALL, key, writer)

    def _pack_response(self, writer: MessageWriter, response: Any, names: Any) -> None:
        parameters = json.dumps(response._parameters) if response._parameters else ""
        error = response._error
        if error is not None:
            writer.u32(ERROR)
            writer.text(parameters)
            writer.text(error._message)
            writer.u32(error._code)
            return
        tensors = [t for t in response._tensors if names is None or t.name() in names]
        if names is not None and len(tensors) < len(names):
            # so that the server can say what the missing ones are called here
            known = (*names, *self._output_names)
            tensors += [t for t in response._tensors if t.name() not in known]
        writer.u32(RESPONSE)
        writer.text(parameters)
        writer.u32(len(tensors))
        for tensor in tensors:
            writer.tensor(tensor)

    def empty(self, shape: Any, dtype: Any) -> None:
        """No array of this end lies in shared memory."""
        return None

    def end(self) -> None:
        """Forgets what was lent: nobody will return it."""
        self._lent.clear()
        self._passing.clear()
        self._heard.clear()

    def statistics(self) -> dict[str, int]:
        """What is held."""
        with self._lock:
            self._take_back()
        return {"lent": len(self._lent), "passing": len(self._passing), "used": self._extents.used}
