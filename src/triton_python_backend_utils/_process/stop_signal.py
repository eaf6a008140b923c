"""SIGTERM, which service managers send to every process of a service, is for the server: it lets what is under way finish
and then ends the processes of its models. These take no notice, or their requests would fail.

What a model starts itself is asked to end as usual: a handler, unlike an ignored signal, is not passed on to programs, and
forked processes get the system's own way back. The signal is held up while a process is forked, or one that comes before that
would be lost. A model that sets a handler of its own has chosen.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

STOP = {signal.SIGTERM}
_hooked = False
_thread = threading.local()  # holds: whether it is forking and holds the signal up


def _take_no_notice(_number: int, _frame: Any) -> None:
    """The server says when to end."""


def _hold() -> None:
    _thread.holds = signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, STOP)


def _go_on() -> None:
    if _thread.holds:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


def _as_usual() -> None:
    if signal.getsignal(signal.SIGTERM) is _take_no_notice:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _go_on()


def outlive() -> None:
    """Called on the main thread of a process that ends when the server says so, or ends itself."""
    global _hooked
    signal.signal(signal.SIGTERM, _take_no_notice)
    if not _hooked:
        os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_as_usual)
        _hooked = True
