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

from neptrio.errors import Internal, Reason

log = logging.getLogger("neptrio.kernel")

PATIENCE = 30.0  # seconds that ask() waits


class DriverThread:
    """Makes posted calls one after the other. Every method may be called by any thread, post() in a destructor too."""

    def __init__(self, name: str) -> None:
        self.name = name
        # a SimpleQueue, because its put() can interrupt itself: destructors run anywhere
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("%s: a call of the driver failed", self.name)
            del call  # what it refers to should die now, not with the next call

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

        self._calls.put(answer)
        if not done.wait(seconds):
            raise Internal(f"{self.name} did not answer within {seconds:g} s", reason=Reason.BACKEND)
        result, error = found
        if error is not None:
            raise error
        return result

    def settle(self, seconds: float) -> bool:
        """Waits until all that was posted before is done; False if that takes longer."""
        done = threading.Event()
        self._calls.put(done.set)
        return done.wait(seconds) or not self._thread.is_alive()

    def end(self) -> None:
        """Ends the thread after what was posted before. Later calls are never made."""
        self._calls.put(None)
