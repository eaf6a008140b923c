"""The end of a process that has served: everything in good order, but without taking the interpreter to pieces.

The problem: threads may still run Python when a server is told to stop: one that imports, one of a model, one that a
library has left behind. CPython up to 3.13 ends such a thread, in the moment in which it wants the interpreter back, by
unwinding its stack (python/cpython, issue 87135). Where a frame on that stack is of C++ or Rust and catches everything, as
those of pydantic and many libraries of models do, the C library ends the process with SIGABRT, "FATAL: exception not
rethrown". Nothing of the interpreter is needed any more, and its end takes time that grows with what was loaded.

Rules:
 1. What others have asked to be done at the end is done: threads that are no daemons are waited for, functions of
    `atexit` are called, what is left in sys.stdout and sys.stderr is written.
 2. Then the process ends while all other threads are where they are.
 3. Processes that have not served, as most commands, end as any Python program: they have no such threads.
 4. So does one that still holds a GPU, which has failed: destructors give back what is left on it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from neptrio import process_parts

_served = False


def serves() -> None:
    """From now on this process is one that serves."""
    global _served
    _served = True


def is_to_leave() -> bool:
    """Whether this process has to end with leave() (rules 3 and 4)."""
    return _served and not process_parts.gpus


def leave(status: int) -> NoReturn:
    """Ends the process; to be called by its main thread, when all of its own work is done."""
    # the interpreter does both in this order at its end; Python offers no public way to do them before
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(status)
