"""What belongs to a model's code is found, and a look at young objects frees it."""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from neptrio.loop.ended_code import EndedCode
from neptrio.loop.thaw import thaw

PACKAGE = "of_a_model"
MANY = 1_000_000
# every object in it is one of a cycle
CODE = """
import collections, functools, logging, types

log = logging.getLogger("a.model")

class Part:
    def __init__(self, whole):
        self.whole, self.table = whole, {"itself": self, "more": [self]}

    @property
    def one(self):
        return helper.value

class Whole:
    def __init__(self):
        self.log = log
        self.parts = collections.deque(Part(self) for _ in range(10))
        self.call = functools.partial(self.parts.append, self)
        self.closure = lambda: self
        self.going = self.goes()
        next(self.going)

    def goes(self):
        yield self
"""


@pytest.fixture
def by_hand() -> Iterator[None]:
    """The collector looks only when the test says so; what there is, is hidden from it."""
    gc.collect()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


class Code:
    """A model's modules and its object."""

    def __init__(self) -> None:
        module, helper = types.ModuleType(f"{PACKAGE}.model"), types.ModuleType(f"{PACKAGE}.helper")
        exec(CODE, module.__dict__)
        exec("class Value: pass\nvalue = Value()\nvalue.itself = value\ndef f(): pass", helper.__dict__)
        module.helper = helper  # type: ignore[attr-defined]
        self.roots: list[Any] = [module.__dict__["Whole"](), module]
        self.parts = [weakref.ref(part) for part in self.roots[0].parts]
        self.parts += [weakref.ref(helper.__dict__["value"]), weakref.ref(helper), weakref.ref(self.roots[0])]

    def alive(self) -> int:
        return sum(part() is not None for part in self.parts)


def test_what_was_hidden_is_freed_by_a_look_at_young_objects(by_hand: None) -> None:
    code = Code()
    gc.freeze()
    assert 50 < thaw(code.roots, PACKAGE, MANY) < 500, "and nothing of other packages"
    code.roots.clear()
    assert code.alive() == len(code.parts), "it refers to itself"
    gc.collect(0)
    assert code.alive() == 0


def test_without_it_nothing_is_found(by_hand: None) -> None:
    code = Code()
    gc.freeze()
    code.roots.clear()
    gc.collect()
    assert code.alive() == len(code.parts)


def test_what_is_held_from_elsewhere_stays(by_hand: None) -> None:
    code = Code()
    held = code.roots[0].parts[3]
    gc.freeze()
    thaw(code.roots, PACKAGE, MANY)
    code.roots.clear()
    gc.collect(0)
    assert held.table["itself"] is held and held.whole.parts[3] is held and held.one.itself
    assert code.alive() == len(code.parts)
    del held
    gc.collect(0)
    assert code.alive(), "it is no longer among the youngest"
    gc.collect(1)
    assert code.alive() == 0


def test_too_many_stay_where_they_are(by_hand: None) -> None:
    code = Code()
    gc.freeze()
    hidden = gc.get_freeze_count()
    assert thaw(code.roots, PACKAGE, 40) == -1
    assert gc.get_freeze_count() == hidden
    thaw(code.roots, PACKAGE, MANY)
    assert gc.get_freeze_count() < hidden


class Pretends:
    """Of a kind of its own when it is asked; nobody may."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError("asked")


class Lazy(types.ModuleType):
    """Is imported when something of it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("asked")


def test_objects_are_not_asked(by_hand: None) -> None:
    found = thaw([[Pretends(), Lazy("lazy"), Lazy(f"{PACKAGE}.lazy"), Pretends]], PACKAGE, MANY)
    assert found in (3, 4)  # from 3.14 on the lazy one's dictionary, too


@pytest.mark.parametrize(
    "leads",
    [logging.getLogger("neptrio"), sys.modules, EndedCode([], PACKAGE), gc, Code, {**globals()}],
    ids=lambda leads: type(leads).__name__,
)
def test_what_leads_to_everything_is_not_followed(by_hand: None, leads: Any) -> None:
    assert thaw([[leads]], PACKAGE, MANY) <= 2


def test_who_is_still_held_is_looked_at_again(by_hand: None) -> None:
    code = Code()
    ended = EndedCode(code.roots, PACKAGE)
    held = code.roots[1]
    code.roots.clear()
    ended.collect()
    assert code.alive() and held in ended.alive()
    gc.freeze()
    del held
    ended.collect_again()
    assert code.alive() == 0 and not ended.alive()
