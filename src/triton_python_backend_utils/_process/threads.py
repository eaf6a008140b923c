"""Threads of a model's process: the one place where it starts them.

The system may refuse a thread at any moment (a limit of the user, the container or the memory), and Python raises
RuntimeError then. Here that is an error of what needed the thread, in words that its reader can use. The server's own threads
start in neptrio.loop.threads.

What such a thread does, nobody else does: it receives, or sends what others wait for. So does the main thread, which executes. So
the error of one ends the process, whose end the server notices, instead of leaving those who wait: Python alone would wait for
other threads, also those that a model has started.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from .._errors import TritonModelException


class NoThread(TritonModelException):
    """The system has refused a thread."""


def start(target: Callable[..., Any], *args: Any) -> None:
    """Has a daemon thread call `target(*args)`; the process ends if that raises. Raises NoThread."""
    try:
        threading.Thread(target=_run, args=(target, args), daemon=True).start()
    except (RuntimeError, MemoryError):
        raise NoThread(
            "the system gives the model's process no further thread now (limit of threads, or memory)"
        ) from None


def main(target: Callable[[], None]) -> None:
    """What the main thread does: calls `target()`, which does not return."""
    _run(target, ())


def _run(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        target(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
