"""A front end: the process that serves connections and passes their requests to the engine.

    loop pass, timers, poller        as in the engine
      the way to the engine          rings (front_side) and messages (frames)
        REST, gRPC                   the transports, with what stands here for the engine's services

Rules:
 1. It ends at once, by os._exit, when the engine is gone: nobody waits for what it could still do.
 2. DRAIN: it accepts nothing more, lets its connections end as the engine's own ports would, and ends.
 3. Limits that hold for all clients together are divided by the number of front ends.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

import trio

from neptrio import logs
from neptrio.codec.inflate_budget import InflateBudget
from neptrio.frontend.channel import Layout
from neptrio.frontend.clients import FrontClients, FrontConnections
from neptrio.frontend.connection_balance import ConnectionBalance, ConnectionCounts
from neptrio.frontend.forward import Engine, ForwardingApp, ForwardingCall, Handlers
from neptrio.frontend.frames import Frames, Kind
from neptrio.frontend.front_side import FrontSide, RemoteAdmission, RemoteSharedMemory
from neptrio.loop import allocator, collector, open_files, threads
from neptrio.loop.busy_poll import BusyPoll, granted_ns
from neptrio.loop.interpreter_lock import serve_soon
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timer, Timers
from neptrio.loop.workers import Workers
from neptrio.request.infer_request import monotonic_ns
from neptrio.rings.ring import Segment
from neptrio.scheduling.base import LoopServices
from neptrio.service import Services, Verbs
from neptrio.service.access_log import AccessLog
from neptrio.service.held_bytes import HeldBytes, default_limit
from neptrio.service.logging import LoggingService
from neptrio.service.reopened import reopen_elsewhere
from neptrio.service.request_limits import RequestLimits
from neptrio.settings import Settings
from neptrio.transport.grpc.server import GrpcServer
from neptrio.transport.header_policy import HeaderPolicy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest_server import RestServer

log = logging.getLogger("neptrio.frontend")

AREA = 4 << 30  # bytes of each side's area of the shared memory; pages that are never touched take none
LATE_NS = 1_000_000  # until it is looked again for room
LATEST_NS = 50_000_000
LOOK_SECONDS = 0.1  # between two looks at how many connections there are
ROW_LOOKS = 10  # of them between two whole rows
FEW = 2  # requests under way whose answers are worth looking for before this process sleeps
WAKES_AT_ONCE = 64  # wakes that are read from their socket together: the bytes say nothing
THE_ENGINES: Any = None  # verbs, which are not served here
WAKES_ROOM = 1 << 16  # bytes, more than the socket holds: it has to be read empty


def let_in(
    engine: Engine,
    services: Services,
    start: Callable[[socket.socket, str], bool],
    sock: socket.socket,
    address: str,
) -> bool:
    """Starts a connection; where connections are limited, when the engine has said whether there is room for it.

    They start in the order in which they were accepted: of those that are turned away, new ones take the places of old ones.
    """
    connections = services.connections
    assert isinstance(connections, FrontConnections)
    if not connections.ask:
        return start(sock, address)

    def answered(why: str) -> None:
        connections.answer(why)
        try:
            start(sock, address)
        except RuntimeError:  # this process is ending, and its tasks have ended already
            sock.close()

    connections.ask_for_one()
    engine.ask(Kind.ENTER, address.encode(), answered)
    return True


class FrontRestServer(RestServer):
    """The REST port of a front end."""

    def __init__(self, services: Services, listener: socket.socket, engine: Engine) -> None:
        self._engine = engine
        super().__init__(services, THE_ENGINES, listener)

    def _start(self, sock: socket.socket, address: str) -> bool:
        return let_in(self._engine, self._services, super()._start, sock, address)

    def make_app(
        self, services: Services, verbs: Verbs, policy: HeaderPolicy | None, origins: OriginPolicy
    ) -> RestApp:
        return ForwardingApp(services, verbs, policy, origins, self._engine)


class FrontGrpcServer(GrpcServer):
    """The gRPC port of a front end."""

    call_class = ForwardingCall

    def __init__(self, services: Services, listener: socket.socket, engine: Engine) -> None:
        super().__init__(services, THE_ENGINES, listener)
        self._engine = engine
        self.handlers: Any = Handlers(engine)
        self.handlers_loaded.set()

    def _start(self, sock: socket.socket, address: str) -> bool:
        return let_in(self._engine, self.services, super()._start, sock, address)

    async def load_handlers(self) -> None:
        """They are the engine's."""


class RemoteAudit:
    """In place of the audit log: what a front end itself refuses is recorded by the engine."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def record(
        self,
        verb: str,
        protocol: str,
        client: str,
        who: str,
        *,
        certificate: str = "",
        model: str = "",
        target: str = "",
        error: Exception | None = None,
    ) -> None:
        """See service.audit."""
        code = getattr(error, "code", None)
        told = {
            "verb": verb,
            "protocol": protocol,
            "client": client,
            "who": who,
            "certificate": certificate,
            "model": model,
            "target": target,
            "error": None if code is None else [code.name, str(error)],
        }
        self._frames.send_json(Kind.AUDIT, 0, told)


class Front:
    """One front end."""

    def __init__(self, settings: Settings, number: int, descriptors: list[int]) -> None:
        """`descriptors`: the socket for frames, the socket that wakes this side, the eventfd that wakes the engine, the
        shared memory, the table of connections (connection_balance), and a listener for each of the ports that are served."""
        self._settings = settings
        control, wake, bell, shared, counts, *listeners = descriptors
        self._balance = ConnectionBalance(ConnectionCounts(counts, settings.frontends), number)
        os.close(counts)
        self._frames = Frames(socket.socket(fileno=control))
        self._wake = socket.socket(fileno=wake)
        self._bell = bell
        layout = Layout(AREA)
        loop_pass = LoopPass()
        timers = Timers(loop_pass)
        lag = LoopLag()
        self._loop = LoopServices(
            loop_pass=loop_pass, timers=timers, poller=Poller(loop_pass, timers, lag), lag=lag
        )
        self._end = FrontSide(Segment(shared, layout.size), layout, self._ring, self._late)
        self._admission = RemoteAdmission(self._end)
        self._engine = Engine(self._frames)
        self._looking: Timer | None = None
        self._heard = 0  # how often this process had said that it sleeps when it last read the socket empty
        self._look_ns = LATE_NS
        self._draining = trio.Event()
        self._known = trio.Event()  # the first table of models has come
        self._logging = LoggingService(settings)
        workers = Workers()
        inflating = InflateBudget(workers)
        self._services = Services(
            settings=settings,
            loop=self._loop,
            admission=self._admission,
            workers=workers,
            inflating=inflating,
            request_limits=RequestLimits(
                settings.max_requests_per_second_per_address, settings.max_concurrent_requests_per_address
            ),
            tokens=None if settings.auth_config is None else FrontClients(),
            audit=RemoteAudit(self._frames) if settings.audit_log else None,  # type: ignore[arg-type]
            held=HeldBytes((settings.max_held_bytes or default_limit()) // settings.frontends),
            connections=FrontConnections(
                bool(settings.max_connections or settings.max_connections_per_address),
                lambda address: self._frames.send(Kind.LEAVE, 0, address.encode()),
                open_files.limit(),
                self._balance,
            ),
            shared_memory=RemoteSharedMemory(),  # type: ignore[arg-type]
            access=AccessLog.of(settings),
        )
        self._services.held.add(lambda: inflating.held)
        self._end.tells_clients = self._services.request_limits.on
        self._fronts: list[RestServer | GrpcServer] = []
        sockets = [socket.socket(fileno=each) for each in listeners]
        if settings.allow_http:
            self._fronts.append(FrontRestServer(self._services, sockets.pop(0), self._engine))
        if settings.allow_grpc:
            self._fronts.append(FrontGrpcServer(self._services, sockets.pop(0), self._engine))

    async def run(self) -> None:
        """Serves until the engine asks for an end, or has ended."""
        async with trio.open_nursery() as core:
            await core.start(self._loop.loop_pass.run)
            await core.start(self._loop.timers.run)
            await core.start(self._loop.poller.run)
            core.start_soon(self._listen_to_engine, core)
            core.start_soon(self._write)
            collector.set_up()
            core.start_soon(collector.collect, lambda: self._loop.lag.count)
            self._loop.poller.listen(self._wake.fileno(), self._woken)
            self._look_before_sleeping()
            await self._known.wait()
            async with trio.open_nursery() as fronts:
                self._balance.has(0)
                for front in self._fronts:
                    await fronts.start(front.run)
                self._loop.lag.warning_ns = int(self._settings.loop_lag_warning_ms * 1e6)
                self._frames.send(Kind.READY)
                fronts.start_soon(self._rows)
                await self._draining.wait()
                async with trio.open_nursery() as nursery:
                    for front in self._fronts:
                        nursery.start_soon(front.drain)
                fronts.cancel_scope.cancel()
            if self._services.access is not None:
                await threads.run_surely(self._services.access.close)
            core.cancel_scope.cancel()

    # ------------------------------------------------------------ the rings

    def _look_before_sleeping(self) -> None:
        end, looks_ns = self._end, granted_ns(self._settings.busy_poll_us)
        if looks_ns:
            self._loop.poller.busy_poll = busy_poll = BusyPoll(looks_ns, lambda: 0 < end.under_way <= FEW)
            busy_poll.add(self._wake.fileno(), end)

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _woken(self) -> bool:
        """The engine has pushed something. That it has ended is seen on the socket of the frames."""
        self._drain()
        return True

    def _drain(self) -> None:
        # the engine wakes this process once at most for each time that it said it sleeps, so the socket never fills up; if it
        # did, no wake would be heard any more
        if self._end.sleeps - self._heard >= WAKES_AT_ONCE:
            # before the drain: a wake that comes behind it must be heard, and a socket that was read empty tells none
            self._heard = self._end.sleeps
            try:
                self._wake.recv(WAKES_ROOM, socket.MSG_DONTWAIT)
            except OSError:
                pass  # there are none, or the engine has ended
        if self._end.drain():
            if self._looking is not None:
                self._looking.cancel()
            self._looking = self._loop.timers.at(monotonic_ns(), self._look)

    def _late(self) -> None:
        """Something waits for room."""
        if self._looking is None:
            self._look_ns = LATE_NS
            self._looking = self._loop.timers.at(monotonic_ns() + LATE_NS, self._look)

    def _look(self) -> None:
        self._looking = None
        self._drain()
        if self._end.look() and self._looking is None:
            self._look_ns = min(2 * self._look_ns, LATEST_NS)
            self._looking = self._loop.timers.at(monotonic_ns() + self._look_ns, self._look)

    # ------------------------------------------------------------ messages

    async def _write(self) -> None:
        try:
            await self._frames.write()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            leave()

    async def _listen_to_engine(self, core: trio.Nursery) -> None:
        async for kind, number, payload in self._frames.read():
            if kind == Kind.TABLE:
                told = json.loads(payload)
                known = told["settings"]
                self._admission.renew(told["models"], told["whole"], known["tracing"], known["trace_headers"])
                self._logging.apply(known["logging"])
                self._frames.send(Kind.KNOWN, number)
                self._known.set()
            elif kind == Kind.ASK:
                self._frames.send_json(Kind.ROW, number, self._row())
            elif kind == Kind.DRAIN:
                self._draining.set()
            elif kind == Kind.CLIENTS:
                if self._services.tokens is not None:
                    self._services.tokens.take(pickle.loads(payload))
            elif kind == Kind.PRESSED:
                self._services.connections.press()
            elif kind == Kind.REOPEN:
                core.start_soon(
                    reopen_elsewhere, *([self._services.access] if self._services.access is not None else [])
                )
            else:
                self._engine.came(kind, number, payload)
        leave()

    async def _rows(self) -> None:
        """Tells the engine what this process holds, when that has changed, and what it has logged."""
        told: dict[str, Any] = {}
        looks = logged = 0
        while True:
            connections = sum(front.connections for front in self._fronts)
            if looks % ROW_LOOKS == 0 or connections != told.get("connections"):
                row = self._row()
                if row != told:
                    told = row
                    self._frames.send_json(Kind.ROW, 0, row)
            looks += 1
            logged = self._tell_log(logged)
            self._end.look()
            if self._looking is None and self._end.statistics()["lent"]:
                # memory that the engine has given back: a RETURN wakes nobody
                self._looking = self._loop.timers.at(monotonic_ns(), self._look)
            await trio.sleep(LOOK_SECONDS)

    def _tell_log(self, number: int) -> int:
        """Sends the engine what was logged after the line with that number; the number of the last line. Other threads log
        too, so lines wait for this one to look."""
        tail = logs.tail()
        lines = [] if tail is None else tail.since(number)
        if not lines:
            return number
        self._frames.send_json(Kind.LOG, 0, [[line.time_ms, line.level, line.text] for line in lines])
        return lines[-1].number

    def _row(self) -> dict[str, Any]:
        lag = self._loop.lag.statistics()
        held = self._end.statistics()
        return {
            "connections": sum(front.connections for front in self._fronts),
            "requests": self._end.answered + self._engine.answered,
            "under_way": self._end.under_way + self._engine.under_way,
            "held_bytes": self._services.held.count(),
            "shared_bytes": held["used"] + held["bodies"],
            "lag": lag.cumulative,
            "lag_count": lag.count,
            "lag_sum_ns": lag.sum_ns,
        }


def leave(status: int = 0) -> NoReturn:
    """Ends this process at once."""
    logs.settle()
    os._exit(status)


def main(settings: Settings, number: int, descriptors: list[int]) -> NoReturn:
    """Runs a front end in this process, which was forked from the template."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the engine says when to end
    status = 1
    try:
        allocator.set_up()
        logs.start_logging(settings)
        open_files.raise_limit()
        serve_soon()
        trio.run(Front(dataclasses.replace(settings), number, descriptors).run)
        status = 0
    except BaseException:
        log.exception("a front end failed")
    leave(status)
