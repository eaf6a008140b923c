"""Threads: the one place where the server starts them.

The problem: the system may refuse a thread at any moment (a limit of the user, the container or the memory). Python then
raises RuntimeError where nobody expects it. In a task of the loop that ended the server with everything in it. The choice:
all threads start here, and a refusal is NoThread, an Unavailable that says what is missing.

Rules:
 1. What a client asked for fails: begin(), start() and run() raise NoThread, and the client may try again.
 2. What is done again and again is left out once: its loop catches NoThread.
 3. What nobody asks for again and others wait for is tried until it works: start_surely(), run_surely().
 4. Threads that watch over a process exist before the process does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from neptrio.errors import Unavailable

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two tries


class NoThread(Unavailable):
    """The system has refused a thread."""

    def __init__(self) -> None:
        super().__init__("the system gives the server no further thread now (limit of threads, or memory)")


def make(target: Callable[..., Any], *args: Any, name: str | None = None) -> threading.Thread:
    """A daemon thread that will call `target(*args)`; begin() starts it."""
    return threading.Thread(target=target, args=args, name=name, daemon=True)


def begin(thread: threading.Thread) -> None:
    """Starts a thread that was made. Raises NoThread."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise NoThread from None


def start(target: Callable[..., Any], *args: Any, name: str | None = None) -> threading.Thread:
    """make() and begin(). Raises NoThread."""
    thread = make(target, *args, name=name)
    begin(thread)
    return thread


def start_later(seconds: float, function: Callable[[], Any]) -> threading.Timer:
    """Has a thread call `function` after so many seconds, unless the timer is cancelled. Raises NoThread."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    begin(timer)
    return timer


def start_surely(target: Callable[..., Any], *args: Any, name: str | None = None) -> threading.Thread:
    """start() that tries until it works. Not for the loop's thread."""
    pause = FIRST_PAUSE
    while True:
        try:
            return start(target, *args, name=name)
        except NoThread:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def run(
    function: Callable[..., T],
    *args: Any,
    abandon_on_cancel: bool = False,
    limiter: Any = None,
) -> T:
    """trio.to_thread.run_sync(). Raises NoThread, and what `function` raises."""
    begun = False

    def call() -> T:
        nonlocal begun
        begun = True
        return function(*args)

    try:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except (RuntimeError, MemoryError):
        if begun:
            raise
        raise NoThread from None


async def run_surely(function: Callable[..., T], *args: Any, abandon_on_cancel: bool = False) -> T:
    """run() that tries until there is a thread."""
    pause = FIRST_PAUSE
    while True:
        try:
            return await run(function, *args, abandon_on_cancel=abandon_on_cancel)
        except NoThread:
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
