"""Waits for what needs no task: the connections' sockets, completions, and the next timer.

The problem: with a task per connection every request costs a wake-up of its own: a registration with the
kernel, a scheduling of the task, a pass of trio's loop. That is half of a small request's time with many
connections, and most of it with one. The choice: each socket is registered once with an epoll of our own. When
trio is about to wait, Poller waits instead: for the sockets, for the next timer and for whatever trio itself
waits for. It takes the bytes of every readable socket, then ends the loop pass for all of them: requests that
arrived together are decided together and answered with one send per connection. trio's own loop goes on only
when a task has something to do.

trio lets an instrument run before it waits. The instrument needs trio's epoll and its list of runnable tasks,
which are private attributes; _Inside names them in one place. Where they are not found (another release of
trio, guest mode), or where another Poller does this already, one task waits for our epoll instead, which
behaves the same but is slower. NEPTRIO_POLLER=task asks for that. `way` tells which of the two is active, and
the log tells why when it is the slower one.

Meanwhile a connection's own task sleeps in read(). It is where the connection's errors are raised, where it is
cancelled and where it closes.

Rules:
 1. receive() runs on the trio thread and in no task. It takes what is there without blocking and returns
    whether to go on: after False read() returns, and what receive() raises is raised by read().
 2. A socket is registered exactly while its read() runs, so it must not be closed during that time. If it is, and its
    number is used again, its read() ends with an error. What could not be registered leaves nothing behind.
 3. Sockets and tasks alternate: one round over the ready sockets before each pass of trio's loop, and a pass of
    trio's loop as soon as a task can run, a deadline is near or trio's descriptors are ready.
 4. After our wait returns, trio still waits for as long as it was going to. So we return only when one of its
    own descriptors is ready, or wake it first, so that its wait ends at once.
 5. While we wait instead of trio, timers are fired here, and passes that soon() asks for are ended here, after
    one more round over the sockets.
 6. Before a wait that may last, `busy_poll` looks for what is about to come (loop/busy_poll.py), if there is one.
 7. What takes long comes last in a pass, when what the others have to send was sent: bells of those that go on with long work
    (`late`), and portions of large answers (loop/pending_output.py). While there are such, nobody sleeps.
 8. Where there is no epoll, read() waits for its own socket.
 9. A pass that a task has begun and not ended is ended before the loop sleeps, whoever waits: nobody else does before
    something comes.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import trio

from neptrio.loop.busy_poll import BusyPoll
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.pending_output import Outputs
from neptrio.loop.slices import waiting_fd
from neptrio.loop.timers import Timers
from neptrio.request.infer_request import monotonic_ns

log = logging.getLogger("neptrio.poller")

ROUNDS = 4  # rounds over the ready sockets before other tasks run, where one task waits for all sockets
READY_AT_ONCE = 256
ROOM = select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP if hasattr(select, "epoll") else 0
GIVE_WAY_NS = 20_000_000  # for so long the loop gives way to a thread that began a piece of control work
NAP_SECONDS = 20e-6
WAITED_NS = 50_000  # a look at the sockets that takes less found something at once
LONGEST_WAIT = 60.0  # seconds; also the most that a trio deadline can be late that is set while we wait

_taken: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("neptrio.poller", default=False)


class _Inside:
    """The private attributes of trio that are used: its epoll, its runnable tasks, its next deadline.

    Raises AttributeError where this trio has them elsewhere or not at all.
    """

    def __init__(self) -> None:
        runner: Any = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        if runner.is_guest:
            raise AttributeError("trio does not wait itself in guest mode")
        self.fd: int = runner.io_manager._epoll.fileno()
        self.runnable: Any = runner.runq
        self.next_deadline: Callable[[], float] = runner.deadlines.next_deadline


def _look_inside() -> tuple[_Inside | None, str]:
    """trio's private attributes, or None and the reason why they are not used."""
    if os.environ.get("NEPTRIO_POLLER") == "task":
        return None, "NEPTRIO_POLLER=task asks for it"
    if _taken.get():
        return None, "another server in this thread waits in trio's stead"
    try:
        return _Inside(), ""
    except AttributeError as error:
        return None, f"trio {trio.__version__} is not built as expected: {error}"


def _nothing() -> None:
    """Does nothing. trio's wait ends because it is given this to call."""


class _Watch:
    """A registered socket and the task that sleeps in its read()."""

    __slots__ = ("done", "error", "receive")

    def __init__(self, receive: Callable[[], bool]) -> None:
        self.receive = receive
        self.done = trio.Event()
        self.error: BaseException | None = None


class _BeforeSleep(trio.abc.Instrument):
    """Calls a function when trio is about to sleep."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._call()


class Poller(trio.abc.Instrument):
    """Waits for the sockets of all connections and calls their receive()."""

    def __init__(self, loop_pass: LoopPass, timers: Timers, lag: LoopLag | None = None) -> None:
        self._loop_pass = loop_pass
        self.lag = lag or LoopLag()
        self._timers = timers
        self._watches: dict[int, _Watch] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._late = -1
        self.outputs: Outputs | None = None  # while the poller waits in trio's stead
        self._full: Container[int] = ()  # the sockets without room among them
        self._running = False
        self._helped = 0  # threads that the loop gives way to
        self._give_way_until = 0
        self.inside: _Inside | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self.busy_poll: BusyPoll | None = None  # set by its owner; used in trio's stead only
        self.way = "not started"  # which of the two ways is active, as the start-up text shows it

    async def read(self, sock: socket.socket | int, receive: Callable[[], bool]) -> None:
        """Calls `receive()` whenever `sock` is readable until it returns False or raises."""
        if self._epoll is None or not self._running:
            while True:
                await trio.lowlevel.wait_readable(sock)
                go_on = receive()
                self._loop_pass.end()
                if not go_on:
                    return
        watch = _Watch(receive)
        fd = sock if isinstance(sock, int) else sock.fileno()
        if fd in self._full:
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        else:
            self._epoll.register(fd, select.EPOLLIN)
        before = self._watches.get(fd)
        self._watches[fd] = watch
        if before is not None:  # its socket was closed under it, or the kernel would not have taken this one
            before.error = OSError(errno.EBADF, "the socket was closed while it was read")
            before.done.set()
        try:
            await watch.done.wait()
        finally:
            if self._watches.get(fd) is watch:
                self._forget(fd)
        error, watch.error = watch.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which refers to this frame

    def listen(self, bell: int, callback: Callable[[], bool], late: bool = False) -> None:
        """Has `callback()` called on the trio thread after each write to `bell`, an eventfd or a socket that need not be
        read, until it returns False or unlisten(). On any thread, also before run() has started. `late`: this one's
        turn is behind all others (rule 7); there is one such bell at most."""
        if self._epoll is None:
            raise RuntimeError("bells are heard by an epoll only")
        before = self._watches.get(bell)
        self._watches[bell] = _Watch(callback)  # first: it may ring at once
        if not self._epoll.closed:
            try:
                self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
            except BaseException:
                if before is None:
                    del self._watches[bell]
                else:
                    self._watches[bell] = before
                raise
        if late:
            self._late = bell

    def unlisten(self, bell: int) -> None:
        """Undoes listen(). On any thread, before the descriptor is closed."""
        if bell in self._watches:
            self._forget(bell)

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """While a thread does a short piece of control work, such as reading a model's folder.

        Each system call of such a thread gives the interpreter's lock away. A loop that has something to do at every
        moment lets go of it too briefly for the thread to wake up, so the thread would wait half a millisecond
        after each. Therefore the loop naps before it takes what its sockets had ready at once, but not for long: the thread may
        compute as well. What tasks have to do is not held up: most of it is the load's own.
        """
        self._helped += 1
        self._give_way_until = monotonic_ns() + GIVE_WAY_NS
        try:
            yield
        finally:
            self._helped -= 1

    def _nap(self, polled_ns: int) -> None:
        """Before the pass of what was ready when the sockets were looked at. A loop that has waited then was no obstacle, and a
        nap takes milliseconds where all cores are busy."""
        now = monotonic_ns()
        if now < self._give_way_until and now - polled_ns < WAITED_NS:
            time.sleep(NAP_SECONDS)

    def _forget(self, fd: int) -> None:
        del self._watches[fd]
        if fd == self._late:
            self._late = -1
        if self._epoll is not None and not self._epoll.closed:
            try:
                if fd in self._full:
                    self._epoll.modify(fd, select.EPOLLOUT)
                else:
                    self._epoll.unregister(fd)
            except OSError:
                pass  # it is closed already, and the kernel has forgotten it

    def _take(self, ready: list[tuple[int, int]]) -> bool:
        """Calls receive() of each ready socket once; returns True when trio's own descriptor was among them."""
        watches, full, trios, late, lag = self._watches, self._full, False, None, self.lag
        lag.woke()
        for fd, events in ready:
            if full and fd in full and events & ROOM:
                self.outputs.has_room(fd)  # type: ignore[union-attr]  # only they fill it
                if not events & select.EPOLLIN:
                    continue
            watch = watches.get(fd)
            if watch is None:
                trios = trios or (self.inside is not None and fd == self.inside.fd)
                continue
            if fd == self._late:
                late = watch
                continue
            lag.source = watch.receive
            try:
                if watch.receive():
                    continue
            except BaseException as error:
                watch.error = error
            watch.done.set()
            if watches.get(fd) is watch:
                self._forget(fd)
        self._loop_pass.end()
        if late is not None:
            late.receive()
            self._loop_pass.end()
        if self.outputs is not None and self.outputs.ready:
            self.outputs.write()
            self._loop_pass.end()
        return trios

    # ------------------------------------------------------------ waiting instead of trio

    # trio asks for these once and then calls the compiled methods, for every step of a task
    @property
    def before_task_step(self) -> Callable[[trio.lowlevel.Task], None]:
        return self.lag.step_begins

    @property
    def after_task_step(self) -> Callable[[trio.lowlevel.Task], None]:
        return self.lag.step_ends

    def before_io_wait(self, timeout: float) -> None:
        """Called by trio when it is about to wait for `timeout` seconds; 0 when a task can run."""
        try:
            self._wait(timeout)
        except BaseException:  # trio would remove an instrument that raises, and every connection would hang
            log.exception("the poller failed")
            self._wake()

    def _wait(self, timeout: float) -> None:
        epoll, inside, loop_pass, timers = self._epoll, self.inside, self._loop_pass, self._timers
        assert epoll is not None and inside is not None and self.outputs is not None
        unsent = self.outputs.ready
        waits, busy_poll = self.lag.waits, self.busy_poll
        waits()
        if timeout <= 0:
            self._take(epoll.poll(0, READY_AT_ONCE))
            if timers.fire_due(monotonic_ns()):
                loop_pass.end()
            return
        now = monotonic_ns()
        end, deadline = now + int(min(timeout, LONGEST_WAIT) * 1e9), inside.next_deadline()
        loop_pass.hold()
        try:
            if unended := loop_pass.unended:
                self._take([])
                waits()
            while True:
                wait = 0 if unsent or unended else min(end, timers.next_ns) - now
                unended = False
                ready = (
                    busy_poll.look(self._poll, select.EPOLLIN) if busy_poll is not None and wait > 0 else None
                )
                found = ready or epoll.poll(max(0, wait) / 1e9, READY_AT_ONCE)
                if self._helped:
                    self._nap(now)
                trios = self._take(found)
                if loop_pass.asked and not trios and not inside.runnable:
                    waits()
                    trios = self._take(epoll.poll(0, READY_AT_ONCE))
                    loop_pass.take_asked()
                now = monotonic_ns()
                if timers.fire_due(now):
                    loop_pass.end()
                if trios:
                    return
                waits()
                if now >= end or inside.runnable or loop_pass.asked or inside.next_deadline() < deadline:
                    self._wake()
                    return
        finally:
            loop_pass.release()

    def _end_pass(self) -> None:
        """Rule 9, where trio waits itself. It has decided how long before this."""
        if self._loop_pass.unended:
            self._loop_pass.end()
            self._wake()

    def _poll(self) -> list[tuple[int, int]]:
        assert self._epoll is not None
        return self._epoll.poll(0, READY_AT_ONCE)

    def _wake(self) -> None:
        """Makes trio's next wait end at once."""
        assert self._token is not None
        self._token.run_sync_soon(_nothing, idempotent=True)

    # ------------------------------------------------------------ the task that waits when trio's inside is not used

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The poller's task. Started by the server's nursery before the listeners."""
        self._token = trio.lowlevel.current_trio_token()
        if self._epoll is None:
            self.way = "by a task each (this system has no epoll)"
            log.warning("sockets are waited for %s: slower, same behaviour", self.way)
            with self._ending_passes():
                task_status.started()
                await trio.sleep_forever()
        inside, reason = _look_inside()
        self.inside = inside
        self.way = "in trio's stead" if inside is not None else f"by a task ({reason})"
        if inside is None:
            log.warning("sockets are waited for %s: slower, same behaviour", self.way)
        self._running = True
        look = select.poll()
        look.register(
            self._epoll.fileno(), select.POLLIN
        )  # an epoll is readable when it has something to tell
        fd_before = waiting_fd.set(self._epoll.fileno())
        task_status.started()
        try:
            if inside is None:
                with self._ending_passes():
                    await self._read_for_all(self._epoll)
            self._epoll.register(inside.fd, select.EPOLLIN)
            self.outputs = Outputs(self._epoll, self._watches, self.lag, lambda: look.poll(0))
            self._full = self.outputs.full
            _taken.set(True)
            self._timers.host(True)
            trio.lowlevel.add_instrument(self)
            try:
                await trio.sleep_forever()
            finally:
                trio.lowlevel.remove_instrument(self)
                self._timers.host(False)
                _taken.set(False)
                outputs, self.outputs = self.outputs, None
                outputs.give_up()
                self._full = ()
        finally:
            self._running = False
            waiting_fd.reset(fd_before)
            self._epoll.close()
            self._watches.clear()  # whose owners refer back to it

    @contextmanager
    def _ending_passes(self) -> Iterator[None]:
        before_sleep = _BeforeSleep(self._end_pass)
        trio.lowlevel.add_instrument(before_sleep)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(before_sleep)

    async def _read_for_all(self, epoll: select.epoll) -> NoReturn:
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            for _ in range(ROUNDS):
                ready = epoll.poll(0, READY_AT_ONCE)
                if not ready:
                    break
                self._take(ready)
                self.lag.waits()
