"""The messages of the rings, for an interpreter that cannot load the server's compiled modules: what they are made of,
how they are read and packed, and which extents of the shared memory they take.

Kinds of messages and their form: kinds.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from .._types import BYTES, join_strings, numpy_dtype, split_strings
from .kinds import ERROR, HERE, KEEP_ABOVE, TOP

if TYPE_CHECKING:
    from .plain_side import PlainSide

ALIGN, GRAIN = 64, 256
FULL_SECONDS = 50e-6  # between two looks at a ring that is full
U32, U64, TIMES = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<4Q")
REQUEST = struct.Struct("<IIQ")
PLACE = struct.Struct("<IQQ")


class Entry(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("id", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class RingEnd(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("entries", ctypes.c_uint64), ("own", ctypes.c_uint64))


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class Memory:
    """A mapping of shared memory."""

    def __init__(self, fd: int, size: int) -> None:
        self.array = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self.address = address_of(self.array)


class GivenMessage:
    """A message of the server. One that is lent is returned with the last array over it; a short one is copied."""

    def __init__(self, end: PlainSide, entry: Entry) -> None:
        self.kind: int = entry.kind
        self.id: int = entry.id
        self.offset: int = entry.offset
        self.size: int = entry.size
        self.length: int = entry.length
        self.memory: Any = end.memory
        self.address = end.memory.address + entry.offset  # reach() sets that of a segment
        self.lender: PlainSide | None = None
        if entry.size and (entry.offset & TOP or entry.length > KEEP_ABOVE):
            self.lender = end
        elif entry.size:
            self.memory = end.memory.array[entry.offset : entry.offset + entry.length].copy()
            self.address = address_of(self.memory)

    def reach(self) -> GivenMessage:
        """Maps the segment of a message that lies in one of its own."""
        if self.offset & TOP and self.lender is not None:
            descriptor = self.lender.links.segment(self.offset & ~TOP)
            try:
                self.memory = Memory(descriptor, self.length)
            finally:
                os.close(descriptor)
            self.address = self.memory.address
        return self

    def __del__(self) -> None:
        lender = getattr(self, "lender", None)
        if lender is not None:
            lender.release(self.offset)


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


def input_array(source: InputBytes) -> np.ndarray:
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


class Reader:
    """Reads a private copy of a message's own part."""

    def __init__(self, message: GivenMessage) -> None:
        self._data = ctypes.string_at(message.address, message.size)
        self._at = 0

    def unpack(self, form: struct.Struct) -> Any:
        at = self._at
        self._at = at + form.size
        return form.unpack_from(self._data, at)

    def u32(self) -> int:
        return int(self.unpack(U32)[0])

    def u64(self) -> int:
        return int(self.unpack(U64)[0])

    def text(self) -> str:
        size = self.u32()
        at = self._at
        self._at = at + size
        return self._data[at : at + size].decode("utf-8", "surrogatepass")


class MessageWriter:
    """Collects a message: its own part, and the arrays behind it."""

    def __init__(self) -> None:
        self.own = bytearray()
        self.pieces: list[np.ndarray] = []
        self.data = 0

    def u32(self, value: int) -> None:
        self.own += U32.pack(value)

    def u64(self, value: int) -> None:
        self.own += U64.pack(value & 0xFFFFFFFFFFFFFFFF)

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.own += U32.pack(len(data)) + data

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
        self.own += PLACE.pack(HERE, self.data, len(flat))
        self.pieces.append(flat)
        self.data += (len(flat) + ALIGN - 1) // ALIGN * ALIGN

    def copy(self, target: np.ndarray) -> None:
        used = len(self.own)
        target[:used] = np.frombuffer(self.own, np.uint8)
        at = (used + ALIGN - 1) // ALIGN * ALIGN
        for piece in self.pieces:
            target[at : at + len(piece)] = piece
            at += (len(piece) + ALIGN - 1) // ALIGN * ALIGN


class Extents:
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
