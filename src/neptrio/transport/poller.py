"""What is waited for without a task: the connections' sockets, completions, and the next timer.

The problem: with a task per connection every request costs a wake-up of its own: a registration
with the kernel, a scheduling of the task, a pass of trio's loop. That is half of a small request's
time with many connections, and most of it with one. The choice: the sockets are registered once
with an epoll of our own. Where trio would wait, Poller waits in its stead: for the sockets, for the
next timer and for whatever trio itself waits for. Every readable socket's bytes are taken, then the turn ends for all
of them: requests that arrived together are decided together, and answered with one send per
connection. trio's loop passes only when there is something for a task to do.

trio lets an instrument run before it waits; its epoll and its list of runnable tasks are looked up
in its inside, which _Inside names in one place. Where they are not found (another trio, guest mode)
or where another Poller does it already, one task waits for our epoll instead: the same
behaviour, slower. NEPTRIO_POLLER=task asks for that.

A connection's own task sleeps in read() meanwhile; it stays the place where the connection's
errors surface, where it is cancelled and where it closes.

Rules:
 1. receive() runs on the trio thread and in no task, takes what is there without blocking, and
    says whether to go on. False ends read(); what it raises is raised by read().
 2. A socket is registered exactly while its read() runs, so it must not be closed meanwhile.
 3. Sockets and tasks take turns: one round over the ready sockets before each pass of trio's loop,
    and a pass as soon as a task can run, a deadline is near or trio's descriptors are ready.
 4. trio must not wait behind our back: where it would, it is woken before we return.
 5. While we wait in trio's stead, the timers and what the turn was asked to do later are ours too:
    later is after one more round over the sockets.
 6. Where there is no epoll, read() waits for its own socket.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import trio

from neptrio._cext.request import monotonic_ns
from neptrio.timers import Timers
from neptrio.turn import Turn

log = logging.getLogger("neptrio.poller")

ROUNDS = 4  # over the ready sockets before other tasks run, where a task reads
READY_AT_ONCE = 256
LONGEST_WAIT = 60.0  # seconds: a deadline that was set unseen is late by no more

_taken: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("neptrio.poller", default=False)


class _Inside:
    """What of trio's inside is used: its epoll, its runnable tasks and its next deadline.

    Raises AttributeError where this trio has them elsewhere or not at all.
    """

    def __init__(self) -> None:
        runner: Any = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        if runner.is_guest:
            raise AttributeError("trio does not wait itself in guest mode")
        self.fd: int = runner.io_manager._epoll.fileno()
        self.runnable: Any = runner.runq
        self.next_deadline: Callable[[], float] = runner.deadlines.next_deadline


def _look_inside() -> _Inside | None:
    if os.environ.get("NEPTRIO_POLLER") == "task" or _taken.get():
        return None
    try:
        return _Inside()
    except AttributeError:
        return None


def _nothing() -> None:
    """Wakes trio."""


class _Watch:
    __slots__ = ("done", "error", "receive")

    def __init__(self, receive: Callable[[], bool]) -> None:
        self.receive = receive
        self.done = trio.Event()
        self.error: BaseException | None = None


class Poller(trio.abc.Instrument):
    """The shared reader."""

    def __init__(self, turn: Turn, timers: Timers) -> None:
        self._turn = turn
        self._timers = timers
        self._watches: dict[int, _Watch] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._running = False
        self._inside: _Inside | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    async def read(self, sock: socket.socket | int, receive: Callable[[], bool]) -> None:
        """Calls `receive()` whenever `sock` is readable until it returns False or raises."""
        if self._epoll is None or not self._running:
            while True:
                await trio.lowlevel.wait_readable(sock)
                go_on = receive()
                self._turn.end()
                if not go_on:
                    return
        watch = _Watch(receive)
        fd = sock if isinstance(sock, int) else sock.fileno()
        self._watches[fd] = watch
        self._epoll.register(fd, select.EPOLLIN)
        try:
            await watch.done.wait()
        finally:
            if self._watches.get(fd) is watch:
                self._forget(fd)
        if watch.error is not None:
            raise watch.error

    def _forget(self, fd: int) -> None:
        del self._watches[fd]
        if self._epoll is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def _take(self, ready: list[tuple[int, int]]) -> bool:
        """One round over ready sockets; True when trio's own descriptor was among them."""
        watches, trios = self._watches, False
        for fd, _events in ready:
            watch = watches.get(fd)
            if watch is None:
                trios = trios or (self._inside is not None and fd == self._inside.fd)
                continue
            try:
                if watch.receive():
                    continue
            except BaseException as error:
                watch.error = error
            if watches.get(fd) is watch:
                self._forget(fd)
            watch.done.set()
        self._turn.end()
        return trios

    # ------------------------------------------------------------ in trio's stead

    def before_io_wait(self, timeout: float) -> None:
        """trio's loop is about to wait for `timeout` seconds: 0 while a task can run."""
        try:
            self._wait(timeout)
        except BaseException:  # trio would drop the instrument, and with it every connection
            log.exception("the poller failed")
            self._wake()

    def _wait(self, timeout: float) -> None:
        epoll, inside, turn, timers = self._epoll, self._inside, self._turn, self._timers
        assert epoll is not None and inside is not None
        if timeout <= 0:
            self._take(epoll.poll(0, READY_AT_ONCE))
            if timers.fire_due(monotonic_ns()):
                turn.end()
            return
        now = monotonic_ns()
        end, deadline = now + int(min(timeout, LONGEST_WAIT) * 1e9), inside.next_deadline()
        turn.hold()
        try:
            while True:
                wait = min(end, timers.next_ns) - now
                trios = self._take(epoll.poll(max(0, wait) / 1e9, READY_AT_ONCE))
                if turn.asked and not trios and not inside.runnable:
                    trios = self._take(epoll.poll(0, READY_AT_ONCE))
                    turn.take_asked()
                now = monotonic_ns()
                if timers.fire_due(now):
                    turn.end()
                if trios:
                    return
                if now >= end or inside.runnable or turn.asked or inside.next_deadline() < deadline:
                    self._wake()
                    return
        finally:
            turn.release()

    def _wake(self) -> None:
        """trio's wait is over at once."""
        assert self._token is not None
        self._token.run_sync_soon(_nothing, idempotent=True)

    # ------------------------------------------------------------ the task

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The task; started by the server's nursery before the fronts."""
        if self._epoll is None:
            task_status.started()
            return
        self._inside = inside = _look_inside()
        self._running = True
        task_status.started()
        try:
            if inside is None:
                await self._read_for_all(self._epoll)
                return
            self._token = trio.lowlevel.current_trio_token()
            self._epoll.register(inside.fd, select.EPOLLIN)
            _taken.set(True)
            self._timers.host(True)
            trio.lowlevel.add_instrument(self)
            try:
                await trio.sleep_forever()
            finally:
                trio.lowlevel.remove_instrument(self)
                self._timers.host(False)
                _taken.set(False)
        finally:
            self._running = False
            self._epoll.close()

    async def _read_for_all(self, epoll: select.epoll) -> None:
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            for _ in range(ROUNDS):
                ready = epoll.poll(0, READY_AT_ONCE)
                if not ready:
                    break
                self._take(ready)
