"""The two rings to a model's process, explored until nothing new is found: every order of every event.

Both ends are the real ones, with rings of one entry. Only what threads do with them is played here, in the steps in
which it can be interrupted: the server pushes, its timer fires, the main thread and the second thread take, say that
they sleep, look again, and sleep. The main thread may stop to take from its ring until an acknowledgement has been heard
on the other, as a sender does whose window is full.

From every state that can be reached, the threads that are awake are let run: everything must arrive, once and in order,
whatever lies in the other ring. Only memory that is returned may lie in its ring while there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from neptrio.rings import child as ring_child
from tests.support.rings import Pair

ENTRIES = 1
MOST = ENTRIES + 1  # that were sent on a ring and not taken: one of them waits in line
LINE = 64
WORK, CONTROL = "work", "control"
AWAKE, SAID, ASLEEP = "awake", "said that it sleeps", "asleep"
EVENTS = ("end", "return", "acknowledge", "timer", "main", "second", "wait")
REQUEST = 1 << 20


class Run:
    """One history of the rings, as far as it matters what follows."""

    def __init__(self) -> None:
        self.pair = Pair(area=4096, entries=ENTRIES)
        self.sent: dict[str, list[str]] = {WORK: [], CONTROL: []}
        self.ends = self.heard = 0  # how many were taken
        self.state = {WORK: AWAKE, CONTROL: AWAKE}
        self.waits = False  # the main thread, for an acknowledgement
        self.lags = 0

    def word(self, ring: str, line: int, size: int = 8) -> int:
        at = getattr(self.pair.layout, ring) + line * LINE
        return int.from_bytes(self.pair.shared.read(at, size), "little")

    def say_asleep(self, ring: str, value: int) -> None:
        at = getattr(self.pair.layout, ring) + 2 * LINE
        self.pair.shared.write(at, value.to_bytes(4, "little"))

    def left(self, ring: str) -> list[str]:
        """What was sent on a ring and not taken from it, in order."""
        return self.sent[ring][self.word(ring, 1) :]

    @property
    def key(self) -> Any:
        return (
            *(tuple(self.left(ring)) for ring in (WORK, CONTROL)),
            *(self.word(ring, 0) - self.word(ring, 1) for ring in (WORK, CONTROL)),
            *(self.word(ring, 2, 4) for ring in (WORK, CONTROL)),
            *self.state.values(),
            self.sent[CONTROL][: self.word(CONTROL, 1)].count("acknowledge") - self.heard,
            self.waits,
            self.pair.lags > self.lags,
        )

    def apply(self, event: str) -> bool:
        """Whether the event can happen."""
        server = self.pair.server
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
            if self.pair.lags == self.lags:
                return False
            self.lags = self.pair.lags
            server.flush()
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
        if state != AWAKE and not self.word(ring, 2, 4):  # it was woken, or never fell asleep
            self.state[ring] = AWAKE
        elif state == ASLEEP:
            return False
        elif state == SAID:
            if self.word(ring, 0) == self.word(ring, 1):
                self.state[ring] = ASLEEP
            else:
                self.say_asleep(ring, 0)
                self.state[ring] = AWAKE
        elif not (self.take_end() if ring == WORK else self.hear()):
            self.say_asleep(ring, 1)
            self.state[ring] = SAID
        return True

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
            assert taken[0] == ring_child.K_ACKNOWLEDGE
            assert taken[3] == due[self.heard], "an acknowledgement came twice, late or never"
            self.heard += 1
            self.waits = False
        return True

    def settle(self) -> None:
        """Lets whoever is awake run until all sleep."""
        before = None
        while (now := self.key) != before:
            before = now
            for event in ("second", "main", "timer"):
                self.apply(event)
        assert self.heard == self.sent[CONTROL].count("acknowledge"), "an acknowledgement waits for ever"
        assert (
            self.left(CONTROL) == ["return"] * len(self.left(CONTROL)) and len(self.left(CONTROL)) <= ENTRIES
        )
        if not self.waits:
            assert not self.left(WORK), "the end of a sequence waits for ever"
            assert self.pair.server.waiting == 0


def replay(path: tuple[str, ...]) -> Iterator[Run]:
    run = Run()
    try:
        for event in path:
            assert run.apply(event)
        yield run
    finally:
        run.pair.close()


def test_everything_arrives_from_every_state() -> None:
    seen: set[Any] = set()
    frontier: list[tuple[str, ...]] = [()]
    full = 0
    while frontier:
        following = []
        for path in frontier:
            for event in EVENTS:
                for run in replay(path):
                    if not run.apply(event) or run.key in seen:
                        continue
                    seen.add(run.key)
                    following.append((*path, event))
                    full += run.pair.server.waiting > 0
                    assert not run.pair.violations
                    run.settle()
        frontier = following
    assert full > 50 and len(seen) > 500  # lines were reached, and not only the first few states
