"""The connections with output that the kernel has not taken yet, for the poller (loop/poller.py).

The problem: a large answer is given to the kernel in portions, between which others are served, and whatever its buffer has no
room for waits for the peer. A task per answer cost a pass of trio's loop for each portion, which took as long as giving it
to the kernel. The choice: the poller sends the portions, behind the sockets and bells of each pass and what these have
to send, and its own epoll tells when a full buffer has room.

Rules:
 1. Nobody's portion is sent twice before everybody's was sent once. A pass ends when a slice is used up, or when somebody waits.
 2. The epoll is asked for room only where there was none: an epoll that always has something to tell could not tell whether
    somebody waits.
 3. A socket may be read and written at the same time, but it is registered with the epoll once.
 4. What the epoll does not take is sent by a task: no output is left without somebody who sends it.
 5. Whoever closes a socket calls drop() first. What is dropped is called once more, to end what waits for it.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Container
from typing import Protocol

from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.slices import SLICE_NS
from neptrio.request.infer_request import monotonic_ns

log = logging.getLogger("neptrio.poller")


class Output(Protocol):
    """What a connection has yet to send: a loop.socket_writer.SocketWriter."""

    full: bool  # the kernel has taken less than it was given

    def write(self) -> bool:
        """Sends a portion. False: nothing is left."""

    def write_by_task(self) -> None:
        """From now on the writer has to see to it itself."""


class Outputs:
    """Who has something to send, in order, and who waits for room. Trio thread only."""

    def __init__(
        self, epoll: select.epoll, read: Container[int], lag: LoopLag, somebody_waits: Callable[[], object]
    ) -> None:
        """`read`: the descriptors that are registered for reading."""
        self._epoll = epoll
        self._lag = lag
        self._read = read
        self._somebody_waits = somebody_waits
        self.ready: deque[tuple[int, Output]] = deque()
        self.full: dict[int, Output] = {}

    def add(self, fd: int, output: Output) -> None:
        """Has `output.write()` called until it returns False, but not again before its socket `fd` has room."""
        if output.full:
            try:
                if fd in self._read:
                    self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
                else:
                    self._epoll.register(fd, select.EPOLLOUT)
            except OSError:  # the kernel takes no further socket: it waits with trio's epoll, or ends there
                _by_task(output)
                return
            self.full[fd] = output
        else:
            self.ready.append((fd, output))

    def drop(self, fd: int, output: Output) -> None:
        """The socket will be closed: forgets that it has no room."""
        if self.full.get(fd) is output:
            self.has_room(fd)

    def has_room(self, fd: int) -> None:
        """The epoll has told that the socket has room, or is broken."""
        output = self.full.pop(fd)
        try:
            if fd in self._read:
                self._epoll.modify(fd, select.EPOLLIN)
            else:
                self._epoll.unregister(fd)
        except OSError:
            pass  # it is closed already, which write() notices
        self.ready.append((fd, output))

    def write(self) -> None:
        """Sends a portion of each, as far as rule 1 allows."""
        ready, begun = self.ready, monotonic_ns()
        for _ in range(len(ready)):
            fd, output = ready.popleft()
            self._lag.source = output.write
            try:
                more = output.write()
            except Exception:
                log.exception("output could not be sent")
                more = False
            if more:
                self.add(fd, output)
            if ready and (monotonic_ns() - begun > SLICE_NS or self._somebody_waits()):
                return

    def give_up(self) -> None:
        """Nobody will call write() any more."""
        for fd in list(self.full):
            self.has_room(fd)
        while self.ready:
            _by_task(self.ready.popleft()[1])


def _by_task(output: Output) -> None:
    try:
        output.write_by_task()
    except RuntimeError:
        pass  # its connection's nursery has ended
