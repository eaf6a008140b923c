"""Which models keep which others from executing, while the senders of ensembles' steps wait.

The problem: the sender of a decoupled step that waits for other steps keeps its model's instance meanwhile. Where two ensembles
cross two models in opposite order, each sender may wait for what can execute only after the other, for ever; so may one whose
other steps have the same model. The choice: what waits is known for all ensembles of the server together, as what keeps
something and what needs something. A wait that would close a circle is not begun: that sender goes on, and what it sends is
kept.

Rules:
 1. There is never a circle of waits, so one of those that wait has always what it needs, or gets it.
 2. Models count as wholes: one with several instances is taken for kept when one of them is.

Trio thread only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Wait:
    """What a step whose sender waits keeps from others, and what has to execute before it can go on: models and resources of
    the rate limiter."""

    keeps: frozenset[tuple[str, str]]
    needs: frozenset[tuple[str, str]]


class Waits:
    """The waits that are under way."""

    def __init__(self) -> None:
        self._under_way: Counter[Wait] = Counter()

    def begin(self, wait: Wait) -> bool:
        """Notes a wait until end(). False: it would be for ever, and must not begin."""
        if wait not in self._under_way and self._closes_a_circle(wait):
            return False
        self._under_way[wait] += 1
        return True

    def end(self, wait: Wait) -> None:
        """One of those waits is over."""
        self._under_way[wait] -= 1
        if not self._under_way[wait]:
            del self._under_way[wait]

    def _closes_a_circle(self, wait: Wait) -> bool:
        needs = set(wait.needs)
        grown = True
        while grown and needs.isdisjoint(wait.keeps):
            grown = False
            for other in self._under_way:
                if not needs.isdisjoint(other.keeps) and not other.needs <= needs:
                    needs |= other.needs
                    grown = True
        return not needs.isdisjoint(wait.keeps)
