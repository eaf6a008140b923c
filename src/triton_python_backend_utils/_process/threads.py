"""Threads of a model's process: the one place where it starts them.

The system may refuse a thread at any moment (a limit of the user, the container or the memory), and Python raises
RuntimeError then. Here that is an error of what needed the thread, in words that its reader can use. The server's own threads
start in neptrio.loop.threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .._errors import TritonModelException


class NoThread(TritonModelException):
    """The system has refused a thread."""


def start(target: Callable[..., Any], *args: Any) -> None:
    """Has a daemon thread call `target(*args)`. Raises NoThread."""
    try:
        threading.Thread(target=target, args=args, daemon=True).start()
    except (RuntimeError, MemoryError):
        raise NoThread(
            "the system gives the model's process no further thread now (limit of threads, or memory)"
        ) from None
