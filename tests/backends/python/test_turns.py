"""The line of instances that initialize one after the other."""

from __future__ import annotations

import pytest

from neptrio.backends.python.turns import Turns
from neptrio.rings.message import Violation


def test_the_next_begins_when_the_first_is_over_and_who_has_left_never_does() -> None:
    turns, begun = Turns(), []
    one, two, three = object(), object(), object()
    for who, name in ((one, "one"), (two, "two"), (three, "three")):
        turns.ask(who, lambda name=name: begun.append(name))  # type: ignore[misc]
    turns.over(two)
    assert begun == ["one"], "one that waits has ended"
    turns.over(object())
    turns.over(one)
    assert begun == ["one", "three"]
    turns.over(three)
    turns.ask(one, lambda: begun.append("again"))
    assert begun[-1] == "again"


def test_nobody_is_in_line_twice() -> None:
    turns, one = Turns(), object()
    turns.ask(one, lambda: None)
    with pytest.raises(Violation):
        turns.ask(one, lambda: None)
