"""Threads: the one place where the server starts them.

The problem: the system may refuse a thread at any moment (a limit of the user, the container or the memory). Python then
raises RuntimeError where nobody expects it. In a task of the loop that ended the server with everything in it. The choice:
all threads start here, and a refusal is NoThread, an Unavailable that says what is missing.

Rules:
 1. What a client asked for fails: begin(), start() and run() raise NoThread, and the client may try again.
 2. What is done again and again is left out once: its loop catches NoThread.
 3. What nobody asks for again and others wait for is tried until it works: start_surely(), run_surely().
 4. What a function raises on one thread for another, by run() and on_loop(), leaves nothing that only the collector could free.
 5. Threads that watch over a process exist before the process does.
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


class _Attempt:
    """One call of a function by another thread; returns itself where the function has raised.

    What trio carries from thread to thread it keeps: an error refers by its traceback to the frames of its thread, and one of them
    has what was carried. So the error, and requests, bodies and connections, which are in frames too, would stay until the
    collector looks. Here it is taken out by who raises it again, or when nobody waits for it.
    """

    __slots__ = ("_error", "_left")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._left = False

    def __call__(self, function: Callable[..., T], args: tuple[Any, ...]) -> T | _Attempt:
        try:
            return function(*args)
        except BaseException as error:
            self._error = error
            if self._left:
                self._error = None
            return self

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self._left = True
        self._error = None

    def take(self) -> BaseException:
        """The error, once."""
        error, self._error = self._error, None
        assert error is not None
        return error


async def run(
    function: Callable[..., T],
    *args: Any,
    abandon_on_cancel: bool = False,
    limiter: Any = None,
) -> T:
    """trio.to_thread.run_sync(). Raises NoThread, and what `function` raises."""
    attempt = _Attempt()
    try:
        result = await trio.to_thread.run_sync(
            attempt, function, args, abandon_on_cancel=abandon_on_cancel, limiter=limiter
        )
    except (RuntimeError, MemoryError):
        raise NoThread from None
    except BaseException:
        attempt.leave()
        raise
    if isinstance(result, _Attempt):
        raise result.take()
    return result


def on_loop(function: Callable[..., T], *args: Any) -> T:
    """trio.from_thread.run_sync(): has the loop's thread call `function`. For a thread of run(). Raises what it raises."""
    result = trio.from_thread.run_sync(_Attempt(), function, args)
    if isinstance(result, _Attempt):
        raise result.take()
    return result


async def run_surely(function: Callable[..., T], *args: Any, abandon_on_cancel: bool = False) -> T:
    """run() that tries until there is a thread."""
    pause = FIRST_PAUSE
    while True:
        try:
            return await run(function, *args, abandon_on_cancel=abandon_on_cancel)
        except NoThread:
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
