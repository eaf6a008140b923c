"""The two rings to a model's process, explored until nothing new is found: every order of every event.

Both ends are the real ones, with rings of one entry. Only what threads do with them is played here, in the steps in
which it can be interrupted: the server pushes, its timer fires, the main thread and the second thread take, say that
they sleep, look again, and sleep. The main thread may stop to take from its ring until an acknowledgement has been heard
on the other, as a sender does whose window is full.

From every state that can be reached, the threads that are awake are let run: everything must arrive, once and in order,
whatever lies in the other ring. Only memory that is returned may lie in its ring while there is room.

That the exploration finds mistakes is tested with mistakes: the server's end is made once more from its own text
(tests/support/ring_text.py), and lines of it are changed. Unchanged it has the very states of the compiled one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ring_text import TextEnd
from tests.support.rings import Pair
from triton_python_backend_utils._process import kinds

ENTRIES = 1
MOST = ENTRIES + 1  # that were sent on a ring and not taken: one of them waits in line
LINE, RING_HEAD, ENTRY = 64, 256, 32
MOST_STATES = 5000
WORK, CONTROL = "work", "control"
AWAKE, NOTHING, SAID, ASLEEP = "awake", "found nothing", "said that it sleeps", "asleep"
CONTROL_KINDS = {kinds.RETURN: "return", kinds.ACKNOWLEDGE: "acknowledge"}
EVENTS = ("end", "return", "acknowledge", "timer", "main", "second", "wait")
REQUEST = 1 << 20

# what is wrong -> lines of the server's end and what they become
MISTAKES = {
    "a push wakes nobody": (("if (done == 0 or entry.kind != RETURN) and", "if done == 0 and"),),
    "a full ring wakes nobody": (
        ("if (done == 0 or entry.kind != RETURN) and", "if done and entry.kind != RETURN and"),
    ),
    "a ring full of returns wakes nobody": (
        ("if not done and ring_must_wake", "if False and ring_must_wake"),
    ),
    "who sleeps is marked and not woken": (("        ring_wake(&line.ring)\n", ""),),
    "the other ring's sleeper is woken": (("ring_wake(&line.ring)", "ring_wake(&self.work.ring)"),),
    "what waits for one ring holds up the other": (
        (
            "if self.flush(line):\n                    more = True",
            "if self.flush(line):\n                    return True",
        ),
    ),
    "taken from the line before it is pushed": (
        ("queued = line.waiting[0]\n", "queued = line.waiting.popleft()\n"),
        ("            line.waiting.popleft()\n", ""),
    ),
    "pushed and left in the line": (("            line.waiting.popleft()\n", "            return False\n"),),
    "pushed past the line": (
        ("        if line.waiting:\n            line.wait(entry, None, None)\n        elif", "        if"),
    ),
    "nobody looks again behind a push": (("            line.late()\n        return 0", "        return 0"),),
    "nobody looks again behind a flush": (
        (
            "try_push(line, &queued.entry):\n                return True",
            "try_push(line, &queued.entry):\n                return False",
        ),
    ),
    "nobody looks again behind a return": (
        ("            if self.late_return is not None:\n                self.late_return()\n", ""),
    ),
    "a return that finds no room is lost": (("                self.returns.appendleft(offset)\n", ""),),
    "one line is not flushed": (
        (
            "for line in self.lines:\n            if not (",
            "for line in self.lines[:1]:\n            if not (",
        ),
    ),
    "an entry too many": (("if used >= ring.entries:", "if used > ring.entries:"),),
    "the mark of who sleeps stays": (
        (
            "SHARED_LOAD32(ring.base + 2 * LINE) != 0 and SHARED_SWAP32(ring.base + 2 * LINE, 0) != 0\n\n\ncdef void ring_wake",
            "SHARED_LOAD32(ring.base + 2 * LINE) == 0 and SHARED_SWAP32(ring.base + 2 * LINE, 0) != 0\n\n\ncdef void ring_wake",
        ),
    ),
}


class Run:
    """One history of the rings, as far as it matters what follows.

    `make` makes the server's end; `looks_again`: whoever has said that it sleeps looks before it does.
    """

    def __init__(self, make: Callable[[Pair], Any], looks_again: bool) -> None:
        self.pair = Pair(area=4096, entries=ENTRIES)
        self.server = make(self.pair)
        self.looks_again = looks_again
        self.sent: dict[str, list[str]] = {WORK: [], CONTROL: []}
        self.pushed: dict[str, list[str]] = {
            WORK: [],
            CONTROL: [],
        }  # in another order: a return passes by what waits
        self.ends = self.heard = 0  # how many were taken
        self.state = {WORK: AWAKE, CONTROL: AWAKE}
        self.waits = False  # the main thread, for an acknowledgement
        self.looked = 0  # how often the end had asked for the timer, when it last fired
        self.looks = False  # and whether it asked then to be called again

    def word(self, ring: str, line: int, size: int = 8) -> int:
        at = getattr(self.pair.layout, ring) + line * LINE
        return int.from_bytes(self.pair.shared.read(at, size), "little")

    def say_asleep(self, ring: str, value: int) -> None:
        at = getattr(self.pair.layout, ring) + 2 * LINE
        self.pair.shared.write(at, value.to_bytes(4, "little"))

    def left(self, ring: str) -> list[str]:
        """What was sent on a ring and not taken from it."""
        found = self.pushed[ring][self.word(ring, 1) :]
        for event in ("end", "return", "acknowledge"):
            found += [event] * (self.sent[ring].count(event) - self.pushed[ring].count(event))
        return found

    def note(self) -> None:
        """Notes what was pushed since."""
        for ring, names in ((WORK, {kinds.SEQUENCE_END: "end"}), (CONTROL, CONTROL_KINDS)):
            for number in range(len(self.pushed[ring]), self.word(ring, 0)):
                at = getattr(self.pair.layout, ring) + RING_HEAD + number % ENTRIES * ENTRY
                self.pushed[ring].append(names[int.from_bytes(self.pair.shared.read(at, 4), "little")])

    @property
    def timer_is_set(self) -> bool:
        return self.looks or self.pair.lags > self.looked

    def lying(self, ring: str) -> list[tuple[int, int]]:
        """What lies in a ring: the kind, and how far behind the last that was taken it was sent."""
        found = []
        base, taken = getattr(self.pair.layout, ring) + RING_HEAD, self.word(ring, 1)
        for number in range(taken, self.word(ring, 0)):
            entry = self.pair.shared.read(base + number % ENTRIES * ENTRY, ENTRY)
            kind, _, _, offset, length = struct.unpack("<IIQQQ", entry)
            if ring == WORK:  # of a sequence's end its number is in the message
                length = int.from_bytes(self.pair.shared.read(offset + 4, 8), "little")
            found.append((kind, length - taken if length else 0))
        return found

    @property
    def key(self) -> Any:
        return (
            *(tuple(self.left(ring)) for ring in (WORK, CONTROL)),
            *(self.word(ring, 0) - self.word(ring, 1) for ring in (WORK, CONTROL)),
            *(tuple(self.lying(ring)) for ring in (WORK, CONTROL)),
            *(self.word(ring, 2, 4) for ring in (WORK, CONTROL)),
            *self.state.values(),
            self.pushed[CONTROL][: self.word(CONTROL, 1)].count("acknowledge") - self.heard,
            self.waits,
            self.timer_is_set,
        )

    def apply(self, event: str) -> bool:
        """Whether the event can happen."""
        happened = self.happens(event)
        self.note()
        return happened

    def happens(self, event: str) -> bool:
        server = self.server
        if event == "end":
            if len(self.left(WORK)) == MOST:
                return False
            self.sent[WORK].append(event)
            server.sequence_ended(len(self.sent[WORK]), "idle")
        elif event in ("return", "acknowledge"):
            if len(self.left(CONTROL)) == MOST:
                return False
            self.sent[CONTROL].append(event)
            if event == "return":
                server.return_memory(0)
            else:
                server.acknowledge(REQUEST, len(self.sent[CONTROL]))
        elif event == "timer":
            if not self.timer_is_set:
                return False
            self.looked = self.pair.lags
            self.looks = server.look()
        elif event == "wait":
            if self.waits or self.state[WORK] != AWAKE:
                return False
            self.waits = True
        elif event == "main":
            return not self.waits and self.step(WORK)
        else:
            return self.step(CONTROL)
        return True

    def step(self, ring: str) -> bool:
        """A thread's next step: as wait() and take() of the ends do it."""
        state = self.state[ring]
        if state == ASLEEP:
            if not self.woken(ring):
                return False
            self.say_asleep(ring, 0)
            self.state[ring] = AWAKE
        elif state == SAID:
            if self.looks_again and self.word(ring, 0) != self.word(ring, 1):
                self.say_asleep(ring, 0)
                self.state[ring] = AWAKE
            elif not self.word(ring, 2, 4):  # the kernel compares it before it lets anybody sleep
                self.state[ring] = AWAKE
            else:
                self.state[ring] = ASLEEP
                self.forget_wakes(ring)
        elif state == NOTHING:
            self.say_asleep(ring, 1)
            self.state[ring] = SAID
        elif not (self.take_end() if ring == WORK else self.hear()):
            self.state[ring] = NOTHING
        return True

    def woken(self, ring: str) -> bool:
        """Whether somebody has woken who sleeps there; of the compiled end it is known by its mark alone."""
        if isinstance(self.server, TextEnd):
            return getattr(self.pair.layout, ring) + 2 * LINE in self.server.woken
        return not self.word(ring, 2, 4)

    def forget_wakes(self, ring: str) -> None:
        """What was called before it slept has woken nobody."""
        if isinstance(self.server, TextEnd):
            self.server.woken.discard(getattr(self.pair.layout, ring) + 2 * LINE)

    def take_end(self) -> bool:
        taken = self.pair.child.take()
        if taken is None:
            return False
        self.ends += 1
        assert self.pair.child.sequence_end(taken[2]) == (self.ends, "idle"), (
            "an end came twice, late or never"
        )
        return True

    def hear(self) -> bool:
        child = self.pair.child
        if not child.has_control:
            return False
        taken = child.take_control()
        if taken is not None:
            due = [n for n, kind in enumerate(self.sent[CONTROL], 1) if kind == "acknowledge"]
            assert taken[0] == kinds.ACKNOWLEDGE
            assert taken[3] == due[self.heard], "an acknowledgement came twice, late or never"
            self.heard += 1
            self.waits = False
        return True

    def settle(self) -> None:
        """Lets whoever is awake run until all sleep."""
        before = None
        rounds = 0
        while (now := self.key) != before:
            before = now
            rounds += 1
            assert rounds < 100, "something goes on for ever"
            for event in ("second", "main", "timer"):
                self.apply(event)
        assert self.heard == self.sent[CONTROL].count("acknowledge"), "an acknowledgement waits for ever"
        assert (
            self.left(CONTROL) == ["return"] * len(self.left(CONTROL)) and len(self.left(CONTROL)) <= ENTRIES
        ), "memory that was returned waits for ever"
        if not self.waits:
            assert not self.left(WORK), "the end of a sequence waits for ever"
            assert self.server.waiting == 0, "something waits in a line for ever"


def replay(path: tuple[str, ...], make: Callable[[Pair], Any], looks_again: bool) -> Iterator[Run]:
    run = Run(make, looks_again)
    try:
        for event in path:
            assert run.apply(event)
        yield run
    finally:
        run.pair.close()


def explore(make: Callable[[Pair], Any], looks_again: bool = True) -> tuple[set[Any], int]:
    """The states that can be reached, and in how many of them something waits in line. Raises AssertionError."""
    seen: set[Any] = set()
    frontier: list[tuple[str, ...]] = [()]
    full = 0
    while frontier:
        following = []
        for path in frontier:
            for event in EVENTS:
                for run in replay(path, make, looks_again):
                    if not run.apply(event) or run.key in seen:
                        continue
                    seen.add(run.key)
                    assert len(seen) < MOST_STATES, "something goes on for ever"
                    following.append((*path, event))
                    full += run.server.waiting > 0
                    assert not run.pair.violations
                    run.settle()
        frontier = following
    return seen, full


def test_everything_arrives_from_every_state() -> None:
    seen, full = explore(lambda pair: pair.server)
    assert full > 50 and len(seen) > 500  # lines were reached, and not only the first few states
    assert explore(TextEnd) == (seen, full), "the end that is made from the text is another"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"late or never|for ever"):
        explore(lambda pair: TextEnd(pair, MISTAKES[mistake]))


def test_who_sleeps_without_looking_again_is_found() -> None:
    with pytest.raises(AssertionError, match="waits for ever"):
        explore(lambda pair: pair.server, looks_again=False)
