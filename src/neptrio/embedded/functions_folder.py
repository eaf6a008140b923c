"""The temporary folder with a server's functions as models, which goes with the server however the program ends.

Rules:
 1. Only the process that made the folder removes it: a forked one that ends does nothing.
 2. SIGTERM ends a program at once, unless it has a handler of its own, and nothing is cleaned up. Here the folder is removed
    first, and then the signal does what it would have done. A program's own handler stays: it decides what happens. The
    first process of a container is ended by no signal that it has no handler for, so there nothing is done.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any


class FunctionsFolder:
    """The folder, from its making to remove()."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="neptrio-functions-"))
        self._process = os.getpid()
        self._before: Any = None  # the handler of SIGTERM that ours stands in front of
        if threading.current_thread() is threading.main_thread() and self._process != 1:
            before = signal.getsignal(signal.SIGTERM)
            if before is signal.SIG_DFL or isinstance(getattr(before, "__self__", None), FunctionsFolder):
                self._before = before
                signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: Any) -> None:
        self.remove()
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Removes it. Harmless when it is gone."""
        if os.getpid() != self._process:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._terminate
        ):
            signal.signal(signal.SIGTERM, self._before)
