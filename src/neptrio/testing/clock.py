"""A clock that jumps: deadlines, queue time-outs, idle times and delays of minutes pass in no time.

The server has one clock for every timestamp and timer (request/infer_request.pyx), and trio's for its connections.
Clock stands for both: it is given to trio.run() as its clock, and a jump moves the server's too.

Rules:
 1. The clock is the process's: a jump moves it for every server in the process, also those with trio's own clock,
    whose connections then keep the old time.
 2. It goes on by itself too, as fast as ever, and never goes back.
 3. jump() from another thread than the server's returns before what it caused has happened. What is asked of the
    server after it finds the timers fired.
 4. Processes of models and other clocks (time.monotonic() in a model) do not jump.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import trio

from neptrio.embedded.engine import Engine
from neptrio.request.infer_request import jump_clock, monotonic_ns


class Clock(trio.abc.Clock):
    """The server's clock, and trio's, for tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._sleepers: weakref.WeakSet[threading.Condition] = weakref.WeakSet()

    def jump(self, seconds: float) -> None:
        """Moves the clock ahead, and wakes whoever waits for a time. Any thread. Raises ValueError."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"the clock jumps ahead by a number of seconds, got {seconds!r}")
        jump_clock(int(seconds * 1e9))
        with self._lock:
            engines, sleepers = list(self._engines), list(self._sleepers)
        for engine in engines:
            engine.soon(engine.look_at_clock)
        for sleeper in sleepers:
            with sleeper:
                sleeper.notify_all()

    def now(self) -> float:
        """Seconds of the clock, from an arbitrary point."""
        return monotonic_ns() / 1e9

    def wakes(self, engine: Engine) -> None:
        """Has jump() wake this server."""
        with self._lock:
            self._engines.add(engine)

    def wait(self, condition: threading.Condition, until: Callable[[], bool], end: float = math.inf) -> bool:
        """Waits on a condition (which the caller holds) until `until()` or the time `end`; returns until()."""
        with self._lock:
            self._sleepers.add(condition)
        while not until():
            left = end - self.now()
            if left <= 0:
                return False
            condition.wait(None if left == math.inf else left)
        return True

    # ---------------------------------------------------------------- trio's side

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.now()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.now()
