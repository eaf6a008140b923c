"""Notices that a child process has ended, whoever else holds its sockets.

The problem: a socket says that a process has ended only when everybody who holds it has: a process that a model has
started holds its too, and one that is stopped says nothing at all. The choice: each child is watched by its pidfd.

Rules:
 1. One thread watches all children, in the whole process. prepare() starts it, before there is a child to watch.
 2. Nothing is opened for a child whose end was noticed, so a lack of descriptors hides no end.
 3. Where the system has no pidfds, children are asked every ASK_SECONDS.
 4. What is called at an end does not block: it is called with the lock held, so that forget() returns after it.
 5. A child that nobody waits for is handed over with reap(). If it cannot be watched now, it is looked at before the next is
    started.
 6. A process that this one forks has neither this thread nor these children: there it begins anew.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from neptrio.loop import threads

log = logging.getLogger("neptrio.server")

ASK_SECONDS = 0.5


class Child(Protocol):
    """What is watched."""

    pidfd: int

    def poll(self) -> int | None:
        """The exit status, None while it runs. Reads the status of a child that has ended."""


class Closable(Child, Protocol):
    """A child that can be let go of."""

    def close(self) -> None:
        """Closes the pidfd of a child that has ended."""


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return getattr(error, "errno", errno.ENOSYS) in (errno.EMFILE, errno.ENFILE)
    return True


HAS_PIDFDS = _has_pidfds()


def opened(pid: int) -> int:
    """The pidfd of a child whose status nobody has read; -1 where the system has none. Raises OSError."""
    return os.pidfd_open(pid) if HAS_PIDFDS else -1


def wait(child: Child, seconds: float | None) -> bool:
    """Waits up to so many seconds, None: without a limit. Whether the child has ended."""
    if child.pidfd >= 0:
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
        return child.poll() is not None
    until = None if seconds is None else time.monotonic() + seconds
    while child.poll() is None:
        if until is not None and time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


class ProcessEnds:
    """Calls a function at the end of each child that is watched. Any thread."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Called in a process that was forked (rule 6), where nobody holds the lock any more."""
        self._lock = threading.Lock()
        self._watched: dict[Child, Callable[[], None]] = {}
        self._by_pidfd: dict[int, Child] = {}
        self._unwatched: list[Closable] = []  # to be reaped
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """To be called before a child is started. Raises OSError, or NoThread."""
        with self._lock:
            unwatched, self._unwatched = self._unwatched, []
        for child in unwatched:
            self.reap(child)
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            if self._epoll is None and HAS_PIDFDS:
                self._epoll = select.epoll()
            self._thread = threads.start(self._run, name="process-ends")

    def watch(self, child: Child, on_end: Callable[[], None]) -> None:
        """Calls `on_end()` once the child has ended, unless forget() is called before. Raises OSError."""
        with self._lock:
            self._watched[child] = on_end
            if child.pidfd >= 0 and self._epoll is not None:
                self._by_pidfd[child.pidfd] = child
                try:
                    self._epoll.register(child.pidfd, select.EPOLLIN)
                except OSError:
                    self._drop(child)
                    raise

    def reap(self, child: Closable) -> None:
        """Reads the status of a child that nobody waits for, now or when it ends, and closes it."""
        if child.poll() is not None:
            child.close()
            return
        try:
            self._begin()
            self.watch(child, child.close)
        except (OSError, threads.NoThread):
            with self._lock:
                self._unwatched.append(child)

    def forget(self, child: Child) -> None:
        """Watches it no more. To be called before its pidfd is closed."""
        with self._lock:
            self._drop(child)

    def _drop(self, child: Child) -> Callable[[], None] | None:
        on_end = self._watched.pop(child, None)
        if on_end is not None and child.pidfd >= 0 and self._epoll is not None:
            del self._by_pidfd[child.pidfd]
            try:
                self._epoll.unregister(child.pidfd)
            except OSError:
                pass  # it was not taken
        return on_end

    def _run(self) -> None:
        while True:
            if self._epoll is None:
                time.sleep(ASK_SECONDS)
                with self._lock:
                    for child in list(self._watched):
                        self._look(child)
                continue
            for pidfd, _ in self._epoll.poll():
                with self._lock:
                    found = self._by_pidfd.get(pidfd)
                    if found is not None:
                        self._look(found)

    def _look(self, child: Child) -> None:
        try:
            if child.poll() is not None:
                on_end = self._drop(child)
                if on_end is not None:
                    on_end()
        except Exception:
            log.exception("the end of a process could not be handled")


ends = ProcessEnds()
os.register_at_fork(after_in_child=ends.begin_anew)
