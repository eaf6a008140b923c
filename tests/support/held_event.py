"""A thread's events at the moment at which it clears one: what is set then must not be lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

Event = threading.Event


class HeldEvents:
    """Every threading.Event made meanwhile: the first clear() waits for go_on()."""

    def __init__(self) -> None:
        self.reached = Event()
        self._go_on = Event()
        self.sets = 0  # calls of set() since a thread has reached its clear()

    def go_on(self) -> None:
        self._go_on.set()

    def make(self) -> Event:
        outer = self

        class Held(Event):
            def set(self) -> None:
                super().set()
                outer.sets += outer.reached.is_set()

            def clear(self) -> None:
                outer.reached.set()
                assert outer._go_on.wait(60)
                super().clear()

        return Held()


@contextmanager
def held_events() -> Iterator[HeldEvents]:
    events = HeldEvents()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Event", events.make)
        yield events
