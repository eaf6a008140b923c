"""The server's half of the rings in Python, made from the text of the compiled one, so that a test can change a line of it.

It is what cext/backends/python/ring_sender.pyx and cext/rings/ring.pyx say, without their types: how descriptors are pushed,
wait in line, and wake who sleeps. Messages are written here by hand.
"""

from __future__ import annotations

import functools
import re
import struct
from collections import deque
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support.rings import Pair

ROOT = Path(__file__).resolve().parents[2] / "cext"
SENDER = (ROOT / "backends/python/ring_sender.pyx").read_text()
RING = (ROOT / "rings/ring.pyx").read_text()
KINDS = {
    name: int(number)
    for name, number in re.findall(r"^    ([A-Z_]+) = (\d+)", (ROOT / "rings/kinds.pxd").read_text(), re.M)
}
METHODS = ("push", "push_now", "wake", "post", "flush", "flush_line")
FUNCTIONS = ("ring_push", "ring_must_wake", "ring_wake")
LINE, RING_HEAD, ENTRY = 64, 256, 32
SLOT = 64  # bytes of a message


def _cut(text: str, name: str) -> str:
    """A function of a .pyx file, as Python: its head and declarations without types, and nothing else changed."""
    (found,) = re.findall(
        rf"^( *)(?:cdef \w+|def) {name}\(([^)]*)\)[^\n]*:\n((?:\1    [^\n]*\n|\n)*)", text, re.M
    )
    indent, parameters, body = found
    names = [re.findall(r"\w+", one)[-1] for one in parameters.split(",")]
    body = re.sub(r"^ *cdef (Parcel|Under) \w+\n", "", body, flags=re.M)
    body = re.sub(r"^( *)cdef Entry (\w+)\n", r"\1\2 = Entry()\n", body, flags=re.M)
    body = re.sub(r"^( *)cdef [\w*]+ (\w+ = )", r"\1\2", body, flags=re.M)
    body = re.sub(r"&(?=[a-z])", "", body)
    assert "cdef" not in body, body
    lines = [line[len(indent) :] for line in body.splitlines()]
    return f"def {name}({', '.join(names)}):\n" + "\n".join(lines) + "\n"


@functools.cache
def _code(changes: tuple[tuple[str, str], ...]) -> CodeType:
    sender, ring = SENDER, RING
    for old, new in changes:
        assert old in sender or old in ring, f"there is no {old!r} to be changed"
        sender, ring = sender.replace(old, new), ring.replace(old, new)
    parts = [_cut(ring, name) for name in FUNCTIONS] + [_cut(sender, name) for name in METHODS]
    return compile("".join(parts), "ring_sender.pyx", "exec")


class Entry:
    """A descriptor; `[0]` is a copy, as in C."""

    kind = size = id = offset = length = 0

    def __getitem__(self, index: int) -> Entry:
        made = Entry()
        vars(made).update(vars(self))
        return made

    def packed(self) -> bytes:
        return struct.pack("<IIQQQ", self.kind, self.size, self.id, self.offset, self.length)


class End:
    """A ring's base and the producer's index."""

    def __init__(self, base: int, entries: int) -> None:
        self.base = base
        self.entries = entries
        self.own = 0


class Parcel:
    """A descriptor that waits in line."""


class TextEnd:
    """What a RingSender does, with some of its text replaced. `woken`: where shared_wake() was called."""

    def __init__(self, pair: Pair, changes: tuple[tuple[str, str], ...] = ()) -> None:
        self._shared = pair.shared
        self._messages = pair.layout.inputs
        self.woken: set[int] = set()
        space: dict[str, Any] = {
            **KINDS,
            "LINE": LINE,
            "RING_HEAD": RING_HEAD,
            "ENTRY": ENTRY,
            "Entry": Entry,
            "Parcel": Parcel,
            "SHARED_FENCE": lambda: None,
            "SHARED_LOAD64": lambda at: self._load(at, 8),
            "SHARED_LOAD32": lambda at: self._load(at, 4),
            "SHARED_STORE64": lambda at, value: self._shared.write(at, value.to_bytes(8, "little")),
            "SHARED_SWAP32": self._swap,
            "memcpy": lambda at, entry, size: self._shared.write(at, entry.packed()),
            "shared_wake": self.woken.add,
        }
        exec(_code(changes), space)
        for name in METHODS:
            setattr(self, name, space[name].__get__(self))
        self.host = pair
        self.closed = False
        self.wakes = 0
        self.work = End(pair.layout.work, pair.layout.work_entries)
        self.control = End(pair.layout.control, pair.layout.control_entries)
        self.work_line: deque[Any] = deque()
        self.control_line: deque[Any] = deque()

    def _load(self, at: int, size: int) -> int:
        return int.from_bytes(self._shared.read(at, size), "little")

    def _swap(self, at: int, value: int) -> int:
        before = self._load(at, 4)
        self._shared.write(at, value.to_bytes(4, "little"))
        return before

    def pushed(self, entry: Entry) -> None:
        """Batches alone are noted."""

    def broken(self, text: str) -> None:
        self.host.violated(text)

    @property
    def waiting(self) -> int:
        return len(self.work_line) + len(self.control_line)

    def sequence_ended(self, sequence_id: int, reason: str) -> None:
        message = struct.pack("<IQI", 0, sequence_id, len(reason)) + reason.encode()
        at = self._messages
        self._messages += SLOT
        self._shared.write(at, message)
        entry = Entry()
        entry.kind, entry.size, entry.offset, entry.length = (
            KINDS["SEQUENCE_END"],
            len(message),
            at,
            len(message),
        )
        self.push(True, entry)  # type: ignore[attr-defined]

    def return_memory(self, offset: int) -> None:
        self.post(False, KINDS["RETURN"], 0, offset, 0)  # type: ignore[attr-defined]

    def acknowledge(self, id: int, size: int) -> None:
        self.post(False, KINDS["ACKNOWLEDGE"], id, 0, size)  # type: ignore[attr-defined]
