"""The start of a process that is to serve: a signal ends it at once and without a word, and it has the three streams.

The problem: importing takes the better part of a second. Python's own SIGINT raises KeyboardInterrupt meanwhile, wherever an
import is; the user sees a traceback of files that are not his, and compiled modules, whose start cannot be left half way, fail
with other errors or crash. SIGTERM is lost where the kernel protects the process from it, as a container's first one.

Rules:
 1. The program begins here (__main__.py), before anything is imported that takes time; nor does this module.
 2. A signal ends the process as that signal ends any: a shell reports 130 or 143. So it stays until the server listens to
    signals itself (server_process.py).
 3. A command that does not serve has Python's usual signals once its module is imported: it may have something to clean up.
 4. What a process was told to ignore stays ignored.
 5. A process that was started without one of its streams (`neptrio >&-`) has one that leads nowhere. Otherwise its number would
    go to the next file or socket, and what a library writes to standard error into a client's connection.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def open_streams() -> None:
    """Opens those streams of this process that are closed (rule 5)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(number, True)
            stream = open(number, "w" if number else "r", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _end(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container is still here


def end_at_signals() -> None:
    """From now on a signal ends this process (rule 2). For its main thread."""
    for number in SIGNALS:
        if signal.getsignal(number) is USUAL[number]:
            signal.signal(number, _end)


def take_signals_as_usual() -> None:
    """From now on signals do what they do in any Python program (rule 3). For the main thread."""
    for number in SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, USUAL[number])


class Uninterrupted:
    """While it is entered a KeyboardInterrupt waits for the end: importing must not be left half way."""

    def __enter__(self) -> None:
        self._came = False
        self._waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._waits:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._waits:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came:
                raise KeyboardInterrupt

    def _note(self, _number: int, _frame: object) -> None:
        self._came = True
