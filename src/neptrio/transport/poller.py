"""One task reads for all connections: readiness without a task switch per request.

The problem: with a task per connection every request costs a wake-up of its own: a registration
with the kernel, a scheduling of the task, a turn of the loop. With many connections that is half
of a small request's time. The choice: the sockets are registered once with an epoll of our own,
trio waits for that epoll as for any other descriptor, and one task lets every readable connection
take its bytes, then ends the turn for all of them: requests that arrived together are decided
together, and answered with one send per connection.

A connection's own task sleeps in read() meanwhile; it stays the place where the connection's
errors surface, where it is cancelled and where it closes.

Rules:
 1. receive() runs on the trio thread, takes what is there without blocking, and says whether to go
    on. False ends read(); what it raises is raised by read().
 2. A socket is registered exactly while its read() runs, so it must not be closed meanwhile.
 3. After a few rounds over the ready sockets the loop's other tasks have their turn.
 4. Where there is no epoll, read() waits for its own socket: same behaviour, slower.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

import trio

from neptrio.turn import Turn

ROUNDS = 4  # over the ready sockets before other tasks run
READY_AT_ONCE = 256


class _Watch:
    __slots__ = ("done", "error", "receive")

    def __init__(self, receive: Callable[[], bool]) -> None:
        self.receive = receive
        self.done = trio.Event()
        self.error: BaseException | None = None


class Poller:
    """The shared reader."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._watches: dict[int, _Watch] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._running = False

    async def read(self, sock: socket.socket, receive: Callable[[], bool]) -> None:
        """Calls `receive()` whenever `sock` is readable until it returns False or raises."""
        if self._epoll is None or not self._running:
            while True:
                await trio.lowlevel.wait_readable(sock)
                go_on = receive()
                self._turn.end()
                if not go_on:
                    return
        watch = _Watch(receive)
        fd = sock.fileno()
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

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The task; started by the server's nursery before the fronts."""
        epoll, watches = self._epoll, self._watches
        if epoll is None:
            task_status.started()
            return
        self._running = True
        task_status.started()
        try:
            while True:
                await trio.lowlevel.wait_readable(epoll.fileno())
                for _ in range(ROUNDS):
                    ready = epoll.poll(0, READY_AT_ONCE)
                    if not ready:
                        break
                    for fd, _events in ready:
                        watch = watches.get(fd)
                        if watch is None:
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
        finally:
            self._running = False
            epoll.close()
