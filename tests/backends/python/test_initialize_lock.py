"""The lock of instances that initialize one after the other."""

from __future__ import annotations

import pytest

from neptrio.backends.python.initialize_lock import InitializeLock
from neptrio.rings.message import Violation


def test_the_next_begins_when_the_first_has_released_and_who_has_left_never_does() -> None:
    lock, begun = InitializeLock(), []
    one, two, three = object(), object(), object()
    for who, name in ((one, "one"), (two, "two"), (three, "three")):
        lock.acquire(who, lambda name=name: begun.append(name))  # type: ignore[misc]
    lock.release(two)
    assert begun == ["one"], "one that waits has ended"
    lock.release(object())
    lock.release(one)
    assert begun == ["one", "three"]
    lock.release(three)
    lock.acquire(one, lambda: begun.append("again"))
    assert begun[-1] == "again"


def test_nobody_is_in_line_twice() -> None:
    lock, one = InitializeLock(), object()
    lock.acquire(one, lambda: None)
    with pytest.raises(Violation):
        lock.acquire(one, lambda: None)
