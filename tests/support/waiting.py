"""Waiting for a fact that another process or thread brings about and that has no event of its own.

The only place of the suite that sleeps (tests/test_tree.py looks for others). What a server writes
to its log has an event: `ServerProcess.until_logged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

# long enough for a loaded machine: only a test that fails waits for so long
SECONDS = 60.0


def until(condition: Callable[[], T], what: object = "", seconds: float = SECONDS) -> T:
    """The first true value of `condition()`; AssertionError after `seconds`.

    `what` says what was waited for; a function is called for its text at the end.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true in {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.005)
    return found


async def until_trio(condition: Callable[[], T], what: object = "", seconds: float = SECONDS) -> T:
    """`until()` for a condition on a trio thread: its other tasks go on meanwhile."""
    deadline = trio.current_time() + seconds
    while not (found := condition()):
        if trio.current_time() > deadline:
            raise AssertionError(f"did not come true in {seconds} s: {what() if callable(what) else what}")
        await trio.sleep(0.002)
    return found
