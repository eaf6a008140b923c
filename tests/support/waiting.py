"""Waits for something that another process or thread does and that signals no event.

This is the only place of the suite that sleeps (tests/test_tree.py checks that). For lines in a server's log there is
an event: `ServerProcess.until_logged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

# long enough for a loaded machine; only a failing test waits so long
SECONDS = 60.0


def until(condition: Callable[[], T], what: object = "", seconds: float = SECONDS) -> T:
    """Returns the first true value of `condition()`; AssertionError after `seconds`.

    `what` names what was waited for; if it is a function, it is called for that text at the end.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true in {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.005)
    return found


async def until_trio(condition: Callable[[], T], what: object = "", seconds: float = SECONDS) -> T:
    """`until()` for use on a trio thread, whose other tasks go on meanwhile."""
    deadline = trio.current_time() + seconds
    while not (found := condition()):
        if trio.current_time() > deadline:
            raise AssertionError(f"did not come true in {seconds} s: {what() if callable(what) else what}")
        await trio.sleep(0.002)
    return found
