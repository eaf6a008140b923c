"""A GPU's own thread, for calls of the driver that must not be made where their cause happens.

The problem: memory of a GPU is given back when Python objects die, mostly on the trio thread, and a call of the driver
may take milliseconds, or for ever while a kernel hangs. The choice: such calls are posted to a thread of the device,
which makes them in order. The thread is a daemon: when it hangs, nobody waits for it in vain, and the process can end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from neptrio.errors import Internal, Reason, raise_it
from neptrio.loop import threads

log = logging.getLogger("neptrio.kernel")

PATIENCE = 30.0  # seconds that ask() waits


class DriverThread:
    """Makes posted calls one after the other. Every method may be called by any thread, post() in a destructor too."""

    def __init__(self, name: str) -> None:
        self.name = name
        # a SimpleQueue, because its put() can interrupt itself: destructors run anywhere
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._awaited: set[threading.Event] = (
            set()
        )  # who waits for a call; set when the thread ends without making it
        self._ended = False
        self._thread = threads.start(self._run, name=name)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("%s: a call of the driver failed", self.name)
            del call  # what it refers to should die now, not with the next call
        with self._lock:
            self._ended = True
            for done in self._awaited:
                done.set()

    def _wait(self, call: Callable[[], object], done: threading.Event, seconds: float) -> bool:
        """Has a function called that sets `done`, and waits for that or the thread's end; False if both take longer."""
        with self._lock:
            if self._ended:
                return True
            self._awaited.add(done)
        self._calls.put(call)
        came = done.wait(seconds)
        with self._lock:
            self._awaited.discard(done)
        return came

    def post(self, call: Callable[[], object]) -> None:
        """Has a function called; what it raises is logged."""
        self._calls.put(call)

    def ask(self, call: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Has a function called, and waits for its result. Raises what it raised, or Internal when it takes too long."""
        if threading.current_thread() is self._thread:
            return call()
        found: list[Any] = []
        done = threading.Event()

        def answer() -> None:
            try:
                found.extend((call(), None))
            except BaseException as error:
                found.extend((None, error))
            finally:
                done.set()

        if not self._wait(answer, done, seconds):
            raise Internal(f"{self.name} did not answer within {seconds:g} s", reason=Reason.BACKEND)
        if not found:
            raise Internal(f"{self.name} has ended: nothing uses that GPU any more", reason=Reason.BACKEND)
        raise_it(found.pop())
        return found.pop()

    def settle(self, seconds: float) -> bool:
        """Waits until all that was posted before is done; False if that takes longer."""
        done = threading.Event()
        return self._wait(done.set, done, seconds)

    def end(self) -> None:
        """Ends the thread after what was posted before. Later calls are never made."""
        self._calls.put(None)
