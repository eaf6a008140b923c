"""A server whose system refuses threads, for as long as a file exists."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.support.run_first import with_site

SITE = """
import _thread, os, threading
import trio._core._thread_cache

trio._core._thread_cache.IDLE_TIMEOUT = 0.01  # so that none is left from before

def refusing(start):
    def begin(*args, **more):
        if os.path.exists({flag!r}):
            raise RuntimeError("can't start new thread")
        return start(*args, **more)
    return begin

for module in (_thread, threading):
    for name in ("start_new_thread", "start_joinable_thread", "_start_new_thread", "_start_joinable_thread"):
        if hasattr(module, name):
            setattr(module, name, refusing(getattr(module, name)))
"""


def workers(pid: int) -> int:
    """How many of trio's threads a process has. While it gets no further one, they become fewer."""
    found = 0
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            found += name.read_text().startswith("Trio thread")
    return found


class NoThreads:
    """`env` is the server's environment; with this as a context it gets no thread."""

    def __init__(self, folder: Path) -> None:
        self._flag = folder / "no threads"
        self.env = with_site(folder, SITE.format(flag=f"{self._flag}"))

    def __enter__(self) -> NoThreads:
        self._flag.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self._flag.unlink()
