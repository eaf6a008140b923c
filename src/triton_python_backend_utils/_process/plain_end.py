"""The model's end of the rings for an interpreter that cannot load the server's compiled modules.

It does what cext/rings/child.pyx does, whose text says who owns what, with Python's struct for messages and a small
library without Python (cext/rings/plain_ring.c) for the rings, so any version from 3.8 with numpy will do. Kinds of
messages and their form: cext/rings/kinds.pxd.

It is simpler in one thing: tensors are copied into the shared memory with every response, also where a model
returns an input as it is.

Rules:
 1. Calls of the library hold the GIL, so each is one step for all threads and finalizers.
 2. A finalizer only pushes, or notes in `unsaid` what found no room. Everything that takes `_lock` is called by threads
    that do not hold it: finalizers never take it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from .._errors import TritonError
from .._request import InferenceRequest, InferenceResponse, InferenceTrace
from .._tensor import Tensor
from .._types import BYTES, join_strings, numpy_dtype, split_strings
from .wire import sealed_memory

K_BATCH, K_ANSWER, K_SEQUENCE_END, K_LOOK = 1, 2, 3, 4
K_CANCEL, K_ACKNOWLEDGE, K_CALL_RESPONSE, K_RETURN = 8, 9, 10, 11
K_RESULT, K_SEND, K_CALL, K_TOOK, K_CALL_CANCEL, K_DROPPED, K_RELEASE = 16, 17, 18, 19, 20, 21, 22
RESPONSE, ERROR, OPEN, RESCHEDULED = 0, 1, 2, 3
HERE = 0
START, END, TRACED, TEXT_ID, PARAMETERS, NAMES, CONTEXT = 1, 2, 4, 8, 16, 32, 64
DECOUPLED, BLOCKING, PARENT = 128, 256, 512
FINAL, NULL_RESPONSE = 1, 2
KEEP_ABOVE = 16384
REQUEST_BITS = 20
TOP = 1 << 63  # of an offset: it is a segment's number; of a length: the sender waits for RETURN
ALIGN, GRAIN = 64, 256
FULL_SECONDS = 50e-6  # between two looks at a ring that is full
OPEN_ANSWER = object()
RESCHEDULED_ANSWER = object()
_U32, _U64, _TIMES = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<4Q")
_REQUEST = struct.Struct("<IIQ")
_PLACE = struct.Struct("<IQQ")


class _Entry(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("id", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class _RingEnd(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("entries", ctypes.c_uint64), ("own", ctypes.c_uint64))


class _Memory:
    """A mapping of shared memory."""

    def __init__(self, fd: int, size: int) -> None:
        self.array = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self.address = int(self.array.__array_interface__["data"][0])


class GivenMessage:
    """A message of the server. When the last array over it is gone the server is told."""

    def __init__(self, end: PlainEnd, entry: _Entry) -> None:
        self.offset: int = entry.offset
        self.size: int = entry.size
        if entry.offset & TOP:
            descriptor = end.links.segment(entry.offset & ~TOP)
            try:
                self.memory = _Memory(descriptor, entry.length)
            finally:
                os.close(descriptor)
            self.address = self.memory.address
        else:
            self.memory = end.memory
            self.address = end.memory.address + entry.offset
        self.end = end

    def __del__(self) -> None:
        end = getattr(self, "end", None)
        if end is not None:
            end.release(self.offset)


class InputBytes:
    """The memory of an input."""

    def __init__(
        self, message: GivenMessage, address: int, size: int, dtype: int, shape: Any, fixed: bool
    ) -> None:
        self.message = message
        self.dtype = dtype
        self.shape = shape
        self.size = size
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, fixed),
        }


def _array(source: InputBytes) -> np.ndarray:
    """The array of an input (Tensor._over's convert)."""
    if source.dtype == BYTES:
        elements = split_strings(np.asarray(source)) if source.size else []
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(source.shape)
    dtype = numpy_dtype(source.dtype)
    if source.size == 0:
        return np.empty(source.shape, dtype)
    return np.asarray(source).view(dtype).reshape(source.shape)


class _Reader:
    """Reads a private copy of a message's own part."""

    def __init__(self, message: GivenMessage) -> None:
        self._data = ctypes.string_at(message.address, message.size)
        self._at = 0

    def unpack(self, form: struct.Struct) -> Any:
        at = self._at
        self._at = at + form.size
        return form.unpack_from(self._data, at)

    def u32(self) -> int:
        return int(self.unpack(_U32)[0])

    def u64(self) -> int:
        return int(self.unpack(_U64)[0])

    def text(self) -> str:
        size = self.u32()
        at = self._at
        self._at = at + size
        return self._data[at : at + size].decode("utf-8", "surrogatepass")


class _Packer:
    """Collects a message: its own part, and the arrays behind it."""

    def __init__(self) -> None:
        self.own = bytearray()
        self.pieces: list[np.ndarray] = []
        self.data = 0

    def u32(self, value: int) -> None:
        self.own += _U32.pack(value)

    def u64(self, value: int) -> None:
        self.own += _U64.pack(value & 0xFFFFFFFFFFFFFFFF)

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.own += _U32.pack(len(data)) + data

    def error(self, text: str, code: int) -> None:
        self.u32(ERROR)
        self.text("")
        self.text(text)
        self.u32(code)

    def mark(self) -> tuple[int, int, int]:
        return len(self.own), len(self.pieces), self.data

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forgets what came since mark()."""
        del self.own[mark[0] :]
        del self.pieces[mark[1] :]
        self.data = mark[2]

    def tensor(self, tensor: Any) -> None:
        dtype = tensor.triton_dtype()
        array = np.asarray(tensor.as_numpy())
        if dtype == BYTES:
            flat = np.frombuffer(join_strings(array), np.uint8)
        else:
            flat = np.ascontiguousarray(array, dtype=numpy_dtype(dtype)).reshape(-1).view(np.uint8)
        self.text(tensor.name())
        self.u32(dtype)
        self.u32(array.ndim)
        for dimension in array.shape:
            self.u64(dimension)
        self.own += _PLACE.pack(HERE, self.data, len(flat))
        self.pieces.append(flat)
        self.data += (len(flat) + ALIGN - 1) // ALIGN * ALIGN

    def copy(self, target: np.ndarray) -> None:
        used = len(self.own)
        target[:used] = np.frombuffer(self.own, np.uint8)
        at = (used + ALIGN - 1) // ALIGN * ALIGN
        for piece in self.pieces:
            target[at : at + len(piece)] = piece
            at += (len(piece) + ALIGN - 1) // ALIGN * ALIGN


class _Extents:
    """The free parts of this process's area: [offset, size], in order, never adjacent. The first that fits is taken."""

    def __init__(self, first: int, size: int) -> None:
        self._gaps = [[first, size]]
        self.used = 0

    def take(self, size: int) -> int:
        """An offset, -1 when there is no room."""
        size = (size + GRAIN - 1) // GRAIN * GRAIN
        for i, gap in enumerate(self._gaps):
            if gap[1] >= size:
                offset = gap[0]
                gap[0] += size
                gap[1] -= size
                if not gap[1]:
                    del self._gaps[i]
                self.used += size
                return offset
        return -1

    def give(self, offset: int, size: int) -> None:
        size = (size + GRAIN - 1) // GRAIN * GRAIN
        self.used -= size
        gaps = self._gaps
        i = 0
        while i < len(gaps) and gaps[i][0] < offset:
            i += 1
        gaps.insert(i, [offset, size])
        for at in (i, i - 1):
            if 0 <= at < len(gaps) - 1 and gaps[at][0] + gaps[at][1] == gaps[at + 1][0]:
                gaps[at][1] += gaps[at + 1][1]
                del gaps[at + 1]


class PlainEnd:
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
        self.memory = _Memory(fd, layout["size"])
        os.close(fd)
        base = self.memory.address
        self._work = _RingEnd(base + layout["work"], layout["work_entries"], 0)
        self._control = _RingEnd(base + layout["control"], layout["control_entries"], 0)
        self._answers = _RingEnd(base + layout["done"], layout["done_entries"], 0)
        self._extents = _Extents(layout["outputs"], layout["area"])
        self._lock = threading.Lock()  # of what follows
        self._passing: deque[tuple[int, int, int]] = (
            deque()
        )  # (place in the ring, offset, size): free once it is past
        self._lent: dict[int, int] = {}  # offset -> size of messages that the server looks at where they lie
        self._returned: deque[int] = deque()  # offsets of those that it looks at no more
        self._heard: deque[Any] = deque()
        self._unsaid: list[int] = []
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

    def wait_control(self) -> bool:
        """Sleeps until the second thread's ring holds something; False after a signal."""
        return self._wait(ctypes.byref(self._control)) > 0

    def take(self) -> Any:
        """The next of the main thread's ring as (kind, id, message, length), or None."""
        entry = _Entry()
        if self._library.plain_take(ctypes.byref(self._work), ctypes.byref(entry)) <= 0:
            return None
        message = None if entry.kind == K_LOOK else GivenMessage(self, entry)
        return entry.kind, entry.id, message, entry.length

    def take_control(self) -> Any:
        """The next of the second thread's ring as (kind, id, message, length), or None. Any thread."""
        try:
            return self._heard.popleft()
        except IndexError:
            return self._next_control()

    def _next_control(self) -> Any:
        while True:
            entry = _Entry()
            if self._library.plain_take(ctypes.byref(self._control), ctypes.byref(entry)) <= 0:
                return None
            if entry.kind != K_RETURN:
                message = GivenMessage(self, entry) if entry.kind == K_CALL_RESPONSE else None
                return entry.kind, entry.id, message, entry.length
            self._returned.append(entry.offset)

    def take_returns(self) -> bool:
        """Takes memory back that the server has returned. True when something else came, which take_control() gives."""
        while True:
            taken = self._next_control()
            if taken is None:
                return len(self._heard) > 0
            self._heard.append(taken)

    @property
    def has_control(self) -> bool:
        """Something waits on the second thread's ring."""
        return len(self._heard) > 0 or bool(self._library.plain_waiting(ctypes.byref(self._control)))

    def requests(self, number: int, message: GivenMessage) -> list[InferenceRequest]:
        """What execute() is called with."""
        reader = _Reader(message)
        made = []
        for place in range(reader.u32()):
            request = InferenceRequest.__new__(InferenceRequest)
            flags, inputs, request._timeout = reader.unpack(_REQUEST)
            request._correlation_id = reader.text() if flags & TEXT_ID else reader.u64()
            request._request_id = reader.text()
            context = reader.text() if flags & CONTEXT else None
            request._parameters = json.loads(reader.text()) if flags & PARAMETERS else None
            wanted = None
            names = list(self._output_names)
            if flags & NAMES:
                count, extra = reader.u32(), reader.u32()
                wanted = [reader.text() for _ in range(count)]
                names = wanted[: count - extra]
            request._requested_output_names = names
            id = number << REQUEST_BITS | place
            request._trace = InferenceTrace(id, context) if flags & TRACED else None
            request._flags = flags & (START | END)
            request._model_name = self._model_name
            request._model_version = self._model_version
            request._preferred_memory = None
            request._release_flags = 1
            request._channel = self._channel(id, wanted)
            request._inputs = self._tensors(reader, message, inputs)
            made.append(request)
        return made

    def _tensors(self, reader: _Reader, message: GivenMessage, count: int) -> list[Tensor]:
        data = message.address + (message.size + ALIGN - 1) // ALIGN * ALIGN
        made = []
        for _ in range(count):
            name = reader.text()
            dtype, dimensions = reader.u32(), reader.u32()
            shape = tuple(reader.u64() for _ in range(dimensions))
            place, offset, size = reader.unpack(_PLACE)
            address = (data if place == HERE else self.memory.address) + offset
            source = InputBytes(message, address, size, dtype, shape, self.read_only)
            made.append(Tensor._over(name, dtype, shape, source, _array, False))
        return made

    def response(self, message: GivenMessage) -> tuple[InferenceResponse | None, bool]:
        """(InferenceResponse or None, final) of a response of another model."""
        reader = _Reader(message)
        flags = reader.u32()
        if flags & NULL_RESPONSE:
            return None, bool(flags & FINAL)
        how, text = reader.u32(), reader.text()
        parameters = json.loads(text) if text else None
        if how == ERROR:
            text = reader.text()
            made = InferenceResponse([], TritonError(text, reader.u32()), parameters)
        else:
            made = InferenceResponse(self._tensors(reader, message, reader.u32()), None, parameters)
        return made, bool(flags & FINAL)

    def sequence_end(self, message: GivenMessage) -> tuple[Any, str]:
        """(correlation id, reason)."""
        reader = _Reader(message)
        id: Any = reader.text() if reader.u32() else reader.u64()
        return id, reader.text()

    # ------------------------------------------------------------ saying

    def _push_now(self, entry: _Entry) -> int:
        return int(self._library.plain_push(ctypes.byref(self._answers), ctypes.byref(entry)))

    def release(self, offset: int) -> None:
        """Nothing looks at a message of the server any more. Never blocks, wakes nobody."""
        if self._push_now(_Entry(K_RELEASE, 0, 0, offset, 0)) <= 0:
            self._unsaid.append(offset)

    def _push(self, entry: _Entry) -> int:
        """Pushes, waiting for room, and where the server sleeps rings. Returns how many entries were pushed, ever."""
        while self._unsaid:
            try:
                offset = self._unsaid.pop()
            except IndexError:  # another thread was faster
                break
            if self._push_now(_Entry(K_RELEASE, 0, 0, offset, 0)) <= 0:
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
        self._push(_Entry(kind, 0, id, 0, length))

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
            size_of = self._lent.pop(offset, None)
            if size_of is not None:
                self._extents.give(offset, size_of)

    def _send(self, kind: int, id: int, packer: _Packer) -> None:
        own = len(packer.own)
        total = (own + ALIGN - 1) // ALIGN * ALIGN + packer.data
        keep = any(len(piece) > KEEP_ABOVE for piece in packer.pieces)
        with self._lock:
            offset = self._room(total)
        if offset < 0:
            self.links.catch_up()
            with self._lock:
                offset = self._room(total)
                self._number += 1
                number = self._number
        if offset < 0:
            fd = sealed_memory(total)
            try:
                packer.copy(_Memory(fd, total).array)
                self.links.send_segment(fd, number, total)
            finally:
                os.close(fd)
            self._push(_Entry(kind, own, id, TOP | number, total))
            return
        packer.copy(self.memory.array[offset : offset + total])
        if keep:
            with self._lock:
                self._lent[offset] = total
            self._push(_Entry(kind, own, id, offset, total | TOP))
        else:
            pushed = self._push(_Entry(kind, own, id, offset, total))
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
        packer = _Packer()
        packer.own += _TIMES.pack(began, made, executed, packed)
        packer.u32(0)
        packer.u32(len(answers))
        for answer in answers:
            if answer is OPEN_ANSWER:
                packer.u32(OPEN)
            elif answer is RESCHEDULED_ANSWER:
                packer.u32(RESCHEDULED)
            elif isinstance(answer, str):
                packer.error(answer, 1)
            else:
                before = packer.mark()
                try:
                    self._pack_response(packer, *answer)
                except Exception as problem:
                    packer.back_to(before)
                    packer.error(failed(f"cannot use an output tensor: {problem}"), 1)
        self._send(K_RESULT, number, packer)

    def failure(self, number: int, began: int, made: int, executed: int, packed: int, text: str) -> None:
        """Sends that a whole batch failed."""
        packer = _Packer()
        packer.own += _TIMES.pack(began, made, executed, packed)
        packer.u32(1)
        packer.text(text)
        self._send(K_RESULT, number, packer)

    def respond(self, id: int, response: Any, names: Any, final: bool, size: int) -> None:
        """Sends a response of a sender. Raises what a tensor that cannot be sent raises."""
        packer = _Packer()
        packer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        packer.u64(size)
        if response is not None:
            self._pack_response(packer, response, names)
        self._send(K_SEND, id, packer)

    def call(self, key: int, request: Any, decoupled: bool, blocking: bool, parent: Any, batch: int) -> None:
        """Sends a request to another model."""
        packer = _Packer()
        id = request._correlation_id
        flags = request._flags & (START | END)
        flags |= TEXT_ID if isinstance(id, str) else 0
        flags |= DECOUPLED if decoupled else 0
        flags |= BLOCKING if blocking else 0
        flags |= 0 if parent is None else PARENT
        packer.u32(flags)
        packer.text(request._model_name)
        packer.u64(0 if request._model_version < 0 else request._model_version + 1)
        packer.text(str(request._request_id))
        packer.u64(int(request._timeout))
        if isinstance(id, str):
            packer.text(id)
        else:
            packer.u64(id)
        packer.u64(parent or 0)
        packer.u64(batch)
        packer.text(json.dumps(request._parameters) if request._parameters else "")
        packer.u32(len(request._requested_output_names))
        for name in request._requested_output_names:
            packer.text(name)
        packer.u32(len(request._inputs))
        for tensor in request._inputs:
            packer.tensor(tensor)
        self._send(K_CALL, key, packer)

    @staticmethod
    def _pack_response(packer: _Packer, response: Any, names: Any) -> None:
        parameters = json.dumps(response._parameters) if response._parameters else ""
        error = response._error
        if error is not None:
            packer.u32(ERROR)
            packer.text(parameters)
            packer.text(error._message)
            packer.u32(error._code)
            return
        tensors = [t for t in response._tensors if names is None or t.name() in names]
        packer.u32(RESPONSE)
        packer.text(parameters)
        packer.u32(len(tensors))
        for tensor in tensors:
            packer.tensor(tensor)

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
