"""The server's half of the rings in Python, made from the text of the compiled one, so that a test can change a line of it.

It is what cext/rings and cext/backends/python/ring_sender.pyx say, without their types: how descriptors are pushed,
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
KINDS = {
    name: int(number)
    for name, number in re.findall(r"^    ([A-Z_]+) = (\d+)", (ROOT / "rings/kinds.pxd").read_text(), re.M)
}
# file -> what is made of it
METHODS = {
    "rings/ring.pyx": ("ring_push", "ring_must_wake", "ring_wake"),
    "rings/line.pyx": ("push", "give_back", "push_returns", "wait"),
    "rings/channel.pyx": ("push", "try_push", "post", "flush", "look"),
    "backends/python/ring_sender.pyx": ("wake",),
}
LINE, RING_HEAD, ENTRY = 64, 256, 32
SLOT = 64  # bytes of a message


def _cut(text: str, name: str) -> str:
    """A function of a .pyx file, as Python: its head and declarations without types, and nothing else changed."""
    (found,) = re.findall(
        rf"^( *)(?:cdef \w+|def) {name}\(([^)]*)\)[^\n]*:\n((?:\1    [^\n]*\n|\n)*)", text, re.M
    )
    indent, parameters, body = found
    names = [re.findall(r"\w+", one)[-1] for one in parameters.split(",")]
    body = re.sub(r"^ *cdef (Queued|Line|Small\*|int|bint) \w+\n", "", body, flags=re.M)
    body = re.sub(r"^( *)cdef Entry (\w+)\n", r"\1\2 = Entry()\n", body, flags=re.M)
    body = re.sub(r"^( *)cdef [\w*]+ (\w+ = )", r"\1\2", body, flags=re.M)
    body = re.sub(r"&(?=[a-z])", "", body)
    assert "cdef" not in body, body
    lines = [line[len(indent) :] for line in body.splitlines()]
    return f"def {name}({', '.join(names)}):\n" + "\n".join(lines) + "\n"


@functools.cache
def _code(file: str, changes: tuple[tuple[str, str], ...]) -> CodeType:
    text = (ROOT / file).read_text()
    for old, new in changes:
        text = text.replace(old, new)
    return compile("".join(_cut(text, name) for name in METHODS[file]), file, "exec")


def _check(changes: tuple[tuple[str, str], ...]) -> None:
    texts = "".join((ROOT / file).read_text() for file in METHODS)
    for old, _ in changes:
        assert old in texts, f"there is no {old!r} to be changed"


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


class Queued:
    """A descriptor that waits in line."""


class TextLine:
    """What a Line does. Its messages are the test's business."""

    small_count = sent = 0
    small_room = 1 << 30

    def __init__(self, base: int, entries: int, late: Any) -> None:
        self.ring = End(base, entries)
        self.closed = False
        self.waiting: deque[Any] = deque()
        self.returns: deque[int] = deque()
        self.late = self.late_return = late


class TextEnd:
    """What a RingSender does, with some of its text replaced. `woken`: where shared_wake() was called."""

    def __init__(self, pair: Pair, changes: tuple[tuple[str, str], ...] = ()) -> None:
        _check(changes)
        self._shared = pair.shared
        self._messages = pair.layout.inputs
        self.woken: set[int] = set()
        space: dict[str, Any] = {
            **KINDS,
            "LINE": LINE,
            "RING_HEAD": RING_HEAD,
            "ENTRY": ENTRY,
            "Entry": Entry,
            "Queued": Queued,
            "is_lent": lambda entry: True,
            "SHARED_FENCE": lambda: None,
            "SHARED_LOAD64": lambda at: self._load(at, 8),
            "SHARED_LOAD32": lambda at: self._load(at, 4),
            "SHARED_STORE64": lambda at, value: self._shared.write(at, value.to_bytes(8, "little")),
            "SHARED_SWAP32": self._swap,
            "memcpy": lambda at, entry, size: self._shared.write(at, entry.packed()),
            "shared_wake": self.woken.add,
        }
        layout = pair.layout
        self.work = TextLine(layout.work, layout.work_entries, pair.lag)
        self.control = self.out = TextLine(layout.control, layout.control_entries, pair.lag)
        self.lines = [self.work, self.control]
        for file, names in METHODS.items():
            exec(_code(file, changes), space)
            for end in self.lines if file == "rings/line.pyx" else [self] if "ring.pyx" not in file else []:
                for name in names:
                    setattr(end, name, space[name].__get__(end))
        self.host = pair
        self.closed = self.given_up = False
        self.wakes = 0

    def _load(self, at: int, size: int) -> int:
        return int.from_bytes(self._shared.read(at, size), "little")

    def _swap(self, at: int, value: int) -> int:
        before = self._load(at, 4)
        self._shared.write(at, value.to_bytes(4, "little"))
        return before

    def pushed(self, line: TextLine, entry: Entry) -> None:
        """Batches alone are noted."""

    def give_up(self, text: str) -> None:
        self.host.violated(text)

    @property
    def waiting(self) -> int:
        return sum(len(line.waiting) for line in self.lines)

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
        self.push(self.work, entry)  # type: ignore[attr-defined]

    def return_memory(self, offset: int) -> None:
        self.control.give_back(offset)  # type: ignore[attr-defined]

    def acknowledge(self, id: int, size: int) -> None:
        self.post(self.control, KINDS["ACKNOWLEDGE"], id, size)  # type: ignore[attr-defined]
