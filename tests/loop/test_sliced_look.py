"""Garbage among frozen objects is found in slices, whatever happens between two of them, and nothing else is freed."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import pytest

from neptrio.loop import sliced_look
from neptrio.loop.sliced_look import SlicedLook

A_FEW_OBJECTS = 0  # nanoseconds: as short as a slice can be
LONG = 1_000_000_000
SEEDS = 12
NODES = 400
CHANGES = 2_000


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """The collector looks only when the test says so; what there is, is hidden from it."""
    gc.collect()
    gc.disable()
    assert sliced_look.prepare()
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    """Refers to others, in lists, dictionaries and closures."""

    def __init__(self) -> None:
        self.others: list[Any] = [self]
        self.named: dict[str, Any] = {}
        self.call: Callable[[], Any] = lambda: None

    def refer(self, other: Node, how: int) -> None:
        if how == 0:
            self.others.append(other)
        elif how == 1:
            self.named[str(len(self.named))] = (other, [other])
        else:
            self.call = lambda: other

    def clear(self) -> None:
        self.others, self.named, self.call = [self], {}, lambda: None

    def reached(self) -> list[Node]:
        named = [other for pair in self.named.values() for other in pair[:1]]
        return [*self.others, *named, *([self.call()] if self.call() is not None else [])]


def finish(look: SlicedLook, ns: int = LONG) -> SlicedLook:
    """Makes all slices of a look that are left, and has the collector see what they show."""
    while look.step(ns):
        gc.collect(0)
    gc.collect()  # at all that is not frozen
    return look


def cycle() -> weakref.ref[Node]:
    """One that refers to itself and to which nobody refers."""
    return weakref.ref(Node())


def test_what_nobody_refers_to_is_freed_and_all_else_stays() -> None:
    dropped, held = [cycle() for _ in range(100)], [Node() for _ in range(100)]
    for node in held:
        node.refer(Node(), 1)
    gc.freeze()
    gc.collect()
    assert all(ref() is not None for ref in dropped), "the collector does not see them"
    refs = [weakref.ref(node.named["0"][0]) for node in held]
    look = finish(SlicedLook())
    assert not any(ref() for ref in dropped)
    assert all(ref() is not None for ref in refs)
    assert look.objects_reached > 10 * look.objects_shown, "little but garbage is shown"


def test_the_shortest_slices_find_the_same() -> None:
    dropped = [cycle() for _ in range(100)]
    gc.freeze()
    look, slices = SlicedLook(), 0
    while look.step(A_FEW_OBJECTS):
        slices += 1
    gc.collect(0)
    assert slices > gc.get_freeze_count() // 100
    assert not any(ref() for ref in dropped)


def test_a_large_cycle_is_shown_as_a_whole() -> None:
    first = last = Node()
    for _ in range(5_000):
        last.refer(following := Node(), 0)
        last = following
    last.refer(first, 0)
    ref = weakref.ref(first)
    del first, last, following
    gc.freeze()
    finish(SlicedLook(), A_FEW_OBJECTS)
    assert ref() is None


def test_a_cycle_that_is_frozen_only_in_part_is_freed() -> None:
    node = Node()
    gc.freeze()
    node.refer(young := Node(), 1)
    young.refer(node, 2)
    gc.collect(1)  # the young one survives
    ref = weakref.ref(young)
    del node, young
    finish(SlicedLook())
    assert ref() is None


def test_finalizers_run_once_and_may_keep_what_they_are_of() -> None:
    class Comes:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            kept.append(self)

    kept: list[Comes] = []
    Comes()
    gc.freeze()
    finish(SlicedLook())
    assert len(kept) == 1 and kept[0].me is kept[0]
    gc.freeze()
    finish(SlicedLook())
    assert len(kept) == 1


def test_an_object_that_the_collector_is_not_to_touch_is_passed_over() -> None:
    """A greenlet that waits has references on its stack, which nobody can see."""

    def waits(node: Node) -> None:
        greenlet.getcurrent().parent.switch()
        refs.append(weakref.ref(node))

    refs: list[weakref.ref[Node]] = []
    waiting = greenlet.greenlet(waits)
    waiting.switch(Node())
    gc.freeze()
    dropped = cycle()
    gc.freeze()
    finish(SlicedLook())
    assert dropped() is None
    waiting.switch()
    assert refs


def test_what_is_frozen_meanwhile_waits_for_the_next_look() -> None:
    look = SlicedLook()
    look.step(A_FEW_OBJECTS)
    late = cycle()
    held = [[[i] for i in range(100)] for _ in range(300)]
    gc.freeze()
    assert finish(look, A_FEW_OBJECTS).objects_shown < len(held) * 50, "nor is what is in use shown in vain"
    assert late() is not None
    finish(SlicedLook())
    assert late() is None


def test_a_look_ends_when_everything_is_thawed() -> None:
    look = SlicedLook()
    look.step(A_FEW_OBJECTS)
    gc.unfreeze()
    assert look.step(A_FEW_OBJECTS) is False
    assert SlicedLook().step(A_FEW_OBJECTS) is False
    gc.freeze()
    assert look.step(A_FEW_OBJECTS) is False, "it has ended"
    dropped = cycle()
    gc.freeze()
    finish(SlicedLook())
    assert dropped() is None


def test_a_look_survives_that_all_is_thawed_looked_at_and_frozen_again() -> None:
    look, dropped = SlicedLook(), cycle()
    for _ in range(5):
        look.step(A_FEW_OBJECTS)
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    assert dropped() is None
    finish(look, A_FEW_OBJECTS)


def test_a_look_may_be_given_up_and_two_may_go_on_at_once() -> None:
    given_up, other = SlicedLook(), SlicedLook()
    for _ in range(50):
        given_up.step(A_FEW_OBJECTS)
        other.step(A_FEW_OBJECTS)
    del given_up
    dropped = cycle()
    gc.freeze()
    finish(other)
    finish(SlicedLook())
    assert dropped() is None


def test_the_list_is_whole_afterwards() -> None:
    finish(SlicedLook(), A_FEW_OBJECTS)
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert sum(1 for _ in gc.get_objects()) >= frozen
    gc.collect()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_changes_between_slices_what_is_in_use_stays_and_the_rest_is_freed_in_the_end(
    seed: int,
) -> None:
    chance = random.Random(seed)
    roots = [Node() for _ in range(20)]
    refs: list[weakref.ref[Node]] = []

    def reachable() -> dict[int, Node]:
        found = {id(node): node for node in roots}
        ahead = list(roots)
        while ahead:
            for node in ahead.pop().reached():
                if id(node) not in found:
                    found[id(node)] = node
                    ahead.append(node)
        return found

    def change() -> None:
        nodes = list(reachable().values())
        node = chance.choice(nodes)
        what = chance.random()
        if what < 0.5 and len(nodes) < NODES:
            node.refer(made := Node(), chance.randrange(3))
            refs.append(weakref.ref(made))
            made.refer(chance.choice(nodes), chance.randrange(3))
        elif what < 0.8:
            node.refer(chance.choice(nodes), chance.randrange(3))
        elif what < 0.95:
            node.clear()
        elif what < 0.97:
            gc.freeze()
        elif what < 0.98:
            gc.unfreeze()
            gc.freeze()
        else:
            gc.collect(chance.randrange(2))

    look = SlicedLook()
    for _ in range(CHANGES):
        change()
        if not look.step(A_FEW_OBJECTS):
            look = SlicedLook()
    used = reachable()
    assert all(node.others[0] is node for node in used.values())
    ids = set(used)
    del used
    gc.freeze()
    finish(SlicedLook())
    alive = [node for ref in refs if (node := ref()) is not None]
    assert {id(node) for node in alive} <= ids, "what nobody refers to is gone"
    assert len({id(node) for node in alive} | {id(node) for node in roots}) == len(ids)


def test_references_are_neither_taken_nor_lost() -> None:
    finish(SlicedLook())
    things: list[object] = [Node(), Node.clear, sys.modules, Node, gc.collect]
    counts = [sys.getrefcount(thing) for thing in things]
    finish(SlicedLook(), A_FEW_OBJECTS)
    look = SlicedLook()
    for _ in range(1_000):
        look.step(A_FEW_OBJECTS)
    assert [sys.getrefcount(thing) for thing in things] == counts
