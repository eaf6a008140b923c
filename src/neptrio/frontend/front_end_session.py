"""One process of a front end, as the engine sees it: its start, its rings, its calls and its end.

Rules:
 1. Its end is noticed by its socket, so within milliseconds, or by its pidfd: its requests are cancelled and its memory is
    given back. One that is not ready within START_SECONDS is killed.
 2. What it writes on its rings or its socket is not believed; one that writes what cannot be is killed.
 3. While it has more to say than a pass should take, or no room for what it is told, a timer looks again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from neptrio import logs
from neptrio.backends.python.children import Forked
from neptrio.codec.outputs import select
from neptrio.codec.shared_memory import AskedFromThread
from neptrio.errors import CLASSES, Code, Internal, TritonError
from neptrio.frontend.channel import Layout
from neptrio.frontend.clients import ClientsOfFront, Counted
from neptrio.frontend.engine_side import EngineSide
from neptrio.frontend.frames import Frames, Kind
from neptrio.frontend.front import AREA, LATE_NS, LATEST_NS
from neptrio.frontend.verbs import GrpcCall, HttpCall
from neptrio.loop.loop_lag import BOUNDS_NS
from neptrio.loop.process_ends import ends
from neptrio.loop.timers import Timer
from neptrio.observe.log_tail import LEVELS
from neptrio.request.infer_request import InferRequest, InferResponse, monotonic_ns
from neptrio.rings.message import Violation
from neptrio.rings.ring import Segment
from neptrio.service.auth_config import INFER
from triton_python_backend_utils._process.reserved import sealed_memory

if TYPE_CHECKING:
    from neptrio.frontend.engine import FrontEnds

log = logging.getLogger("neptrio.frontend")

START_SECONDS = 120.0
REST_SECONDS = 1.0  # for what a process had sent when it ended
KILL_SECONDS = 10.0


class FrontEndSession:
    """One process of a front end."""

    def __init__(self, fronts: FrontEnds, number: int) -> None:
        self.fronts = fronts
        self.number = number
        self.pid = 0
        self.ready = trio.Event()
        self.knows_models = False  # it was sent the whole table, and is sent what changes
        self.known = 0  # the generation of the table that it uses
        self.row: dict[str, int] = {}
        self.lag: tuple[int, ...] = (0,) * len(BOUNDS_NS)
        self.told = 0  # the last question for it that was answered
        self.ended = False
        self._calls: dict[int, HttpCall | GrpcCall] = {}
        self._timer: Timer | None = None
        self._look_ns = LATE_NS
        self._nursery: trio.Nursery | None = None
        self._process: Forked | None = None
        services = fronts.services
        layout = Layout(AREA)
        with ExitStack() as opened:  # all or nothing
            control, self._control = map(opened.enter_context, socket.socketpair())
            self._wake, self._their_wake = map(opened.enter_context, socket.socketpair())
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._bell)
            shared = sealed_memory("neptrio-front", layout.size)
            segment = Segment(shared, layout.size)
            opened.pop_all()
        self.clients = ClientsOfFront(services.connections, services.request_limits)
        self.end = EngineSide(segment, layout, self._ring, self._late, services, self)
        self.end.tells_stages = services.access is not None
        control.setblocking(False)
        self.frames = Frames(control)
        self._descriptors = [self._control.fileno(), self._their_wake.fileno(), self._bell, shared]

    # ------------------------------------------------------------ what the end calls

    def _ring(self) -> None:
        try:
            self._wake.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it has bytes enough to wake up, or has ended

    def _late(self) -> None:
        if self._timer is None:
            self._look_ns = LATE_NS
            self._timer = self._at(LATE_NS)

    def _at(self, delay_ns: int) -> Timer:
        return self.fronts.services.loop.timers.at(monotonic_ns() + delay_ns, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.ended:
            return
        self._take()
        if self.end.look() and self._timer is None:
            self._look_ns = min(2 * self._look_ns, LATEST_NS)
            self._timer = self._at(self._look_ns)

    def _take(self) -> bool:
        """Takes what the front end has pushed; if that is much, the rest after other events, and True is returned."""
        more = not self.ended and self.end.drain()
        if more:  # its bell is rung again only when everything was taken
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._at(0)
        return more

    def rung(self) -> bool:
        """The front end has pushed something. False when it has ended, and its bell is listened to no more."""
        self._take()
        return not self.ended

    def violated(self, text: str) -> None:
        """It has written what cannot be."""
        if not self.ended:
            log.error("front end %d (process %d) is killed: %s", self.number, self.pid, text)
            self.kill()

    def owner(self, name: str) -> Any:
        """The client of that name (service.tokens), whose request is counted. Raises Unauthenticated when there is none
        any more, TooManyRequests beyond its rate."""
        tokens = self.fronts.services.tokens
        if tokens is None:
            raise Violation("a client's name, while nobody is asked for one")
        account = tokens.named(name)
        tokens.count(account, (INFER,), monotonic_ns())
        return account

    def enter(self, client: Counted) -> None:
        """A request of a client address begins; leave() is owed. Raises TooManyRequests."""
        self.clients.enter(client)

    def leave(self, client: Counted) -> None:
        """It is answered."""
        self.clients.leave(client)

    def select_later(
        self, end: EngineSide, request: InferRequest, response: InferResponse, final: bool
    ) -> None:
        """Has a worker choose and classify outputs."""
        if self._nursery is not None:
            self._nursery.start_soon(self._select, end, request, response, final)

    async def _select(
        self, end: EngineSide, request: InferRequest, response: InferResponse, final: bool
    ) -> None:
        services = self.fronts.services
        regions = AskedFromThread(services.shared_memory)
        error: TritonError | None = None
        try:
            await services.workers.run(lambda: select(request, response, regions), self)
        except TritonError as found:
            error = found.with_traceback(None)  # which holds this call
        except Exception as found:
            log.exception("classifying outputs failed")
            error = Internal(f"internal error: {type(found).__name__}")
        end.selected(request, response, final, error)
        services.loop.loop_pass.end()

    def take_up_later(self, end: EngineSide, request: InferRequest) -> None:
        """Has a worker take up inputs, and then those of the requests that wait for it."""
        if self._nursery is not None:
            self._nursery.start_soon(self._take_up, end, request)

    async def _take_up(self, end: EngineSide, request: InferRequest | None) -> None:
        services = self.fronts.services
        while request is not None:
            error: TritonError | None = None
            try:
                if end.is_slow(request):
                    await services.workers.run(partial(end.take_up, request), self)
                else:
                    await trio.lowlevel.checkpoint()
            except TritonError as found:
                error = found
            except Exception as found:
                log.exception("reading inputs failed")
                error = Internal(f"internal error: {type(found).__name__}")
            request = end.taken_up(request, error)
            services.loop.loop_pass.end()

    # ------------------------------------------------------------ from start to end

    def kill(self) -> None:
        """SIGKILL; what follows is done when its socket says that it has ended."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Starts the process and serves it until it has ended."""
        try:
            self._process = await self.fronts.template.fork(
                self.number, [*self._descriptors, *self.fronts.passed()]
            )
            self.pid = self._process.pid
            self._control.close()
            self._their_wake.close()
            self.fronts.tell(self)
            self.fronts.services.loop.poller.listen(self._bell, self.rung)
            self.fronts.busy_poll.add(self._bell, self.end)
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._write)
                self._nursery.start_soon(self._until_ready)
                self._nursery.start_soon(self._until_ended, self._process.pidfd)
                try:
                    async with aclosing(self.frames.read()) as frames:
                        async for kind, number, payload in frames:
                            self._came(kind, number, payload)
                            if self.ended:
                                break
                except Exception as error:  # which may be any, of what was written by whoever had the process
                    self.violated(f"{type(error).__name__}: {error}")
                self._gone()
                self._nursery.cancel_scope.cancel()
        finally:
            self._gone()
            with trio.CancelScope(shield=True):
                await self.frames.close()
                if self._process is not None:
                    self.kill()
                    with trio.move_on_after(KILL_SECONDS):
                        await trio.lowlevel.wait_readable(self._process.pidfd)
                    ends.reap(self._process)

    def _gone(self) -> None:
        """It has ended: cancels what it has asked for."""
        if self.ended:
            return
        self.ended = True
        self.fronts.counts.absent(self.number)
        self.fronts.busy_poll.remove(self._bell)
        self.fronts.services.loop.poller.unlisten(self._bell)
        os.close(self._bell)
        for sock in (self._wake, self._their_wake, self._control):
            sock.close()
        if self._timer is not None:
            self._timer.cancel()
        self.end.gone()
        self.clients.end()
        for call in self._calls.values():
            call.end()
        self.fronts.services.loop.loop_pass.end()
        self.fronts.changed()

    async def _until_ready(self) -> None:
        with trio.move_on_after(START_SECONDS) as scope:
            await self.ready.wait()
        if scope.cancelled_caught:
            self.violated(f"it was not ready within {START_SECONDS:g} s")

    async def _until_ended(self, pidfd: int) -> None:
        """Ends run(), whoever else holds the process's sockets."""
        assert self._nursery is not None
        await trio.lowlevel.wait_readable(pidfd)
        await trio.sleep(REST_SECONDS)
        self._nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        try:
            await self.frames.write()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader notices as well

    def _came(self, kind: int, number: int, payload: bytes) -> None:
        assert self._nursery is not None
        call: HttpCall | GrpcCall
        if kind in (Kind.HTTP, Kind.CALL):
            if number in self._calls:
                raise ValueError(f"a second call with the number {number}")
            verbs, frames, clients = self.fronts.verbs, self.frames, self.clients
            if kind == Kind.HTTP:
                call = HttpCall(verbs, frames, number, payload, clients, self.end.begun)
            else:
                call = GrpcCall(verbs, frames, number, payload, clients)
            self._calls[number] = call
            self._nursery.start_soon(self._answer, number, call)
        elif kind == Kind.ENTER:
            why = self.clients.connect(payload.decode())
            self.frames.send_json(Kind.ENTERED, number, why)
        elif kind == Kind.LEAVE:
            self.clients.disconnect(payload.decode())
        elif kind == Kind.KNOWN:
            self.known = number
            self.fronts.changed()
        elif kind == Kind.READY:
            self.ready.set()
            self.fronts.changed()
        elif kind == Kind.ROW:
            self.told = max(self.told, number)
            self.fronts.changed()
            told = json.loads(payload)
            self.lag = tuple(int(count) for count in told.pop("lag"))
            if len(self.lag) != len(BOUNDS_NS):
                raise ValueError(f"a histogram of {len(self.lag)} buckets")
            self.row = {str(name): int(value) for name, value in told.items()}
        elif kind == Kind.LOG:
            self._log(json.loads(payload))
        elif kind == Kind.AUDIT:
            self._audit(json.loads(payload))
        else:
            found = self._calls.get(number)
            if found is not None:
                found.came(kind, payload)

    async def _answer(self, number: int, call: HttpCall | GrpcCall) -> None:
        try:
            await call.run()
        finally:
            self._calls.pop(number, None)

    def _log(self, lines: list[list[Any]]) -> None:
        tail = logs.tail()
        for time_ms, level, text in lines:
            if not 0 <= int(level) < len(LEVELS):
                raise ValueError(f"a line of the log of level {level}")
            if tail is not None:
                tail.add(int(time_ms), int(level), str(text))

    def _audit(self, told: dict[str, Any]) -> None:
        audit = self.fronts.services.audit
        if audit is None:
            return
        error = None
        if told["error"] is not None:
            code = Code[told["error"][0]]
            error = CLASSES.get(code, TritonError)(str(told["error"][1]))
            error.code = code
        audit.record(
            str(told["verb"]),
            str(told["protocol"]),
            str(told["client"]),
            str(told["who"]),
            certificate=str(told["certificate"]),
            model=str(told["model"]),
            target=str(told["target"]),
            error=error,
        )
