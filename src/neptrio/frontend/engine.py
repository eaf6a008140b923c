"""The engine's side: starts front ends, restarts those that end, and drains them.

Rules:
 1. A front end that ends is noticed by its socket, so within milliseconds: its requests are cancelled, its memory is
    given back, and another is started after a pause that doubles, up to LONGEST_PAUSE; one that lived for SETTLED
    seconds starts over.
 2. What a front end knows of models (the table) has a generation. announce() returns when every front end uses the newest.
 3. A front end that writes what cannot be, on its rings or its socket, is killed.
 4. drain(): the listening sockets are closed here first; then each front end closes its own and lets its connections end.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import time
from typing import Any

import trio

from neptrio.backends.python.template import SUPPORTED as CAN_CLONE
from neptrio.codec.outputs import select
from neptrio.codec.shared_memory import AskedFromThread
from neptrio.errors import CLASSES, Code, Internal, TritonError, Unsupported
from neptrio.frontend.channel import Layout
from neptrio.frontend.clients import ClientsOfFront, Counted
from neptrio.frontend.engine_end import EngineEnd
from neptrio.frontend.frames import Frames, Kind
from neptrio.frontend.front import AREA, LATE_NS, LATEST_NS
from neptrio.frontend.template import Template
from neptrio.frontend.verbs import GrpcCall, HttpCall, Verbs
from neptrio.loop.busy_poll import BusyPoll, granted_ns
from neptrio.loop.loop_lag import BOUNDS_NS
from neptrio.loop.timers import Timer
from neptrio.observe.front_ends import FrontEndRow
from neptrio.observe.processes import use
from neptrio.repository.manager import RepositoryManager
from neptrio.request.infer_request import InferRequest, InferResponse, monotonic_ns
from neptrio.rings.message import Violation
from neptrio.rings.ring import SUPPORTED as CAN_SHARE
from neptrio.rings.ring import Segment, sealed_memory
from neptrio.service import Services
from neptrio.service.auth_config import INFER, AuthConfig

log = logging.getLogger("neptrio.frontend")

FIRST_PAUSE, LONGEST_PAUSE, SETTLED = 0.1, 30.0, 60.0  # seconds
START_SECONDS = 120.0
LOOK_SECONDS = 1.0  # between two looks at what front ends should know


class Life:
    """One process of a front end."""

    def __init__(self, fronts: FrontEnds, number: int) -> None:
        self.fronts = fronts
        self.number = number
        self.pid = 0
        self.ready = trio.Event()
        self.known = 0  # the generation of the table that it uses
        self.row: dict[str, int] = {}
        self.lag: tuple[int, ...] = (0,) * len(BOUNDS_NS)
        self.told = 0  # the last question for it that was answered
        self.ended = False
        self._calls: dict[int, HttpCall | GrpcCall] = {}
        self._timer: Timer | None = None
        self._look_ns = LATE_NS
        self._nursery: trio.Nursery | None = None
        self._pidfd = -1
        services = fronts.services
        layout = Layout(AREA)
        shared = sealed_memory("neptrio-front", layout.size)
        self.clients = ClientsOfFront(services.connections, services.request_limits)
        self.end = EngineEnd(Segment(shared, layout.size), layout, self._ring, self._late, services, self)
        control, self._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake, self._their_wake = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
        try:
            waiting = self.end.look()
        except Violation as error:
            self.violated(str(error))
            return
        if waiting and self._timer is None:
            self._look_ns = min(2 * self._look_ns, LATEST_NS)
            self._timer = self._at(self._look_ns)

    def _take(self) -> None:
        """Takes what the front end has pushed; if that is much, the rest after other events."""
        try:
            more = not self.ended and bool(self.end.drain())
        except Violation as error:
            self.violated(str(error))
            return
        if more:  # its bell is rung again only when everything was taken
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._at(0)

    def rung(self) -> bool:
        """The front end has pushed something. False when it has ended, and its bell is listened to no more."""
        try:
            self._take()
        except Exception:
            log.exception("what a front end sent could not be used")
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
        self, end: EngineEnd, request: InferRequest, response: InferResponse, final: bool
    ) -> None:
        """Has a worker choose and classify outputs."""
        if self._nursery is not None:
            self._nursery.start_soon(self._select, end, request, response, final)

    async def _select(
        self, end: EngineEnd, request: InferRequest, response: InferResponse, final: bool
    ) -> None:
        services = self.fronts.services
        regions = AskedFromThread(services.shared_memory)
        error: TritonError | None = None
        try:
            await services.workers.run(lambda: select(request, response, regions), self)
        except TritonError as found:
            error = found
        except Exception as found:
            log.exception("classifying outputs failed")
            error = Internal(f"internal error: {type(found).__name__}")
        end.selected(request, response, final, error)
        services.loop.loop_pass.end()

    # ------------------------------------------------------------ its life

    def kill(self) -> None:
        """SIGKILL; what follows is done when its socket says that it has ended."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def run(self) -> None:
        """Starts the process and serves it until it has ended."""
        try:
            self.pid = await self.fronts.template.fork(
                self.number, [*self._descriptors, *self.fronts.listening()]
            )
            self._pidfd = os.pidfd_open(self.pid)
            self._control.close()
            self._their_wake.close()
            self.fronts.tell(self)
            self.fronts.services.loop.poller.listen(self._bell, self.rung)
            self.fronts.busy_poll.add(self._bell, self.end)
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._write)
                try:
                    async for kind, number, payload in self.frames.read():
                        self._came(kind, number, payload)
                        if self.ended:
                            break
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    self.violated(f"{type(error).__name__}: {error}")
                self._gone()
                self._nursery.cancel_scope.cancel()
        finally:
            self._gone()
            with trio.CancelScope(shield=True):
                await self.frames.close()
                if self._pidfd >= 0:
                    self.kill()
                    await trio.lowlevel.wait_readable(self._pidfd)
                    os.close(self._pidfd)
                    try:
                        os.waitpid(self.pid, 0)
                    except ChildProcessError:
                        pass  # other code has waited for it

    def _gone(self) -> None:
        """It has ended: cancels what it has asked for."""
        if self.ended:
            return
        self.ended = True
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
            made = HttpCall if kind == Kind.HTTP else GrpcCall
            call = self._calls[number] = made(self.fronts.verbs, self.frames, number, payload, self.clients)
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


class FrontEnds:
    """All front ends; one of the server's fronts."""

    def __init__(
        self,
        services: Services,
        repository: RepositoryManager,
        http: socket.socket | None,
        grpc: socket.socket | None,
    ) -> None:
        """Starts the template. Raises OSError, and Unsupported where the system lacks what front ends need."""
        if not (CAN_CLONE and CAN_SHARE):
            raise Unsupported("--frontends needs Linux on x86-64 or ARM64")
        self.services = services
        self._repository = repository
        self._listeners = [listener for listener in (http, grpc) if listener is not None]
        address = str(http.getsockname()[0]) if http is not None else ""
        self.verbs = Verbs(services, address, self.announce)
        self.template = Template(services.settings)
        self._lives: list[Life | None] = [None] * services.settings.frontends
        self._restarts = [0] * services.settings.frontends
        looks_ns = granted_ns(services.settings.frontends_busy_poll_us)
        self.busy_poll = BusyPoll(looks_ns, self._nothing_under_way)
        if looks_ns:
            services.loop.poller.busy_poll = self.busy_poll
        self._draining = False
        self._changed = trio.Event()
        self._table = b""
        self._clients: AuthConfig | None = None
        services.connections.on_press = self.press
        self._generation = 0
        self._questions = 0

    def _nothing_under_way(self) -> bool:
        """Whoever has answered everything expects the next request."""
        return not any(life.end.under_way for life in self._lives if life is not None)

    def listening(self) -> list[int]:
        """The descriptors of the listening sockets."""
        return [listener.fileno() for listener in self._listeners]

    def changed(self) -> None:
        """Somebody's state has changed: those who wait look again."""
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------ what front ends know

    def _describe(self) -> bytes:
        tracer = self.services.admission.tracer
        catalog = self._repository
        models = [
            {
                "name": model.name,
                "version": model.version,
                "latest": catalog.latest.get(model.name) is model,
                "decoupled": model.decoupled,
                "max_batch_size": model.max_batch_size,
                "inputs": [
                    (spec.name, spec.dtype, spec.dims, spec.optional, spec.ragged)
                    for spec in model.input_specs
                ],
            }
            for model in catalog.ready_models()
        ]
        return json.dumps(
            {
                "models": models,
                "tracing": bool(tracer.tracing),
                "trace_headers": bool(tracer.trace_headers),
                "logging": self.services.logging.settings(),
            }
        ).encode()

    def _renew(self) -> None:
        table = self._describe()
        tokens = self.services.tokens
        clients = None if tokens is None else tokens.config
        if table != self._table or clients is not self._clients:
            self._table = table
            self._clients = clients
            self._generation += 1
            for life in self._lives:
                if life is not None and not life.ended:
                    self.tell(life)

    def tell(self, life: Life) -> None:
        """Sends the table to one front end."""
        if not self._generation:
            self._renew()
        if self._clients is not None:
            life.frames.send(Kind.CLIENTS, 0, pickle.dumps(self._clients))
        life.frames.send(Kind.TABLE, self._generation, self._table)

    def press(self) -> None:
        """There is no room for connections: front ends let idle ones end soon."""
        for life in self._lives:
            if life is not None and not life.ended:
                life.frames.send(Kind.PRESSED)

    def reopen(self) -> None:
        """Has front ends open the log's file again."""
        for life in self._lives:
            if life is not None and not life.ended:
                life.frames.send(Kind.REOPEN)

    async def announce(self) -> None:
        """Returns when every front end knows the models, settings and clients that there are now."""
        self._renew()
        while any(
            life is not None and life.ready.is_set() and not life.ended and life.known < self._generation
            for life in self._lives
        ):
            await self._changed.wait()

    async def _watch(self) -> None:
        """Tells front ends of changes that came about in another way than through them."""
        bell = self._repository.readiness
        while True:
            seen = bell.rings
            self._renew()
            for life in self._lives:
                if life is not None and not life.ended:
                    life.end.look()
            with trio.move_on_after(LOOK_SECONDS):
                await bell.wait(seen)

    # ------------------------------------------------------------ their lives

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Starts the front ends, and keeps as many until it is cancelled or drain() has ended them."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.verbs.load)
                nursery.start_soon(self._watch)
                for number in range(len(self._lives)):
                    nursery.start_soon(self._keep, number)
                with trio.move_on_after(START_SECONDS) as scope:
                    while not all(life is not None and life.ready.is_set() for life in self._lives):
                        await self._changed.wait()
                if scope.cancelled_caught:
                    raise Internal(f"the front ends did not start within {START_SECONDS:g} s")
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the template and closes the listening sockets, if that has not been done."""
        self.template.close()
        for listener in self._listeners:
            listener.close()

    async def _keep(self, number: int) -> None:
        pause = FIRST_PAUSE
        while not self._draining:
            begun = time.monotonic()
            life = self._lives[number] = Life(self, number)
            try:
                await life.run()
            except OSError as error:
                log.error("front end %d cannot be started: %s", number, error)
            self.changed()
            if self._draining:
                break
            if time.monotonic() - begun > SETTLED:
                pause = FIRST_PAUSE
            log.error("front end %d (process %d) has ended; the next starts in %g s", number, life.pid, pause)
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._restarts[number] += 1
        self._lives[number] = None
        self.changed()

    @property
    def connections(self) -> int:
        """How many connections are open, as of the last rows."""
        return sum(
            life.row.get("connections", 0) for life in self._lives if life is not None and not life.ended
        )

    async def count(self) -> None:
        """Returns when `connections` is true as of this call or later."""
        self._questions += 1
        question = self._questions
        lives = [life for life in self._lives if life is not None and life.ready.is_set()]
        for life in lives:
            life.frames.send(Kind.ASK, question)
        while any(not life.ended and life.told < question for life in lives):
            await self._changed.wait()

    def rows(self) -> list[FrontEndRow]:
        """A row for each front end that runs."""
        return [self._row(life) for life in self._lives if life is not None and not life.ended]

    def _row(self, life: Life) -> FrontEndRow:
        told = life.row
        resident, seconds = use(life.pid)
        return FrontEndRow(
            number=life.number,
            pid=life.pid,
            restarts=self._restarts[life.number],
            connections=told.get("connections", 0),
            requests=told.get("requests", 0),
            under_way=told.get("under_way", 0),
            held_bytes=told.get("held_bytes", 0),
            shared_bytes=told.get("shared_bytes", 0),
            wakes=life.end.wakes,
            resident_bytes=resident,
            cpu_seconds=seconds,
            lag_cumulative=life.lag,
            lag_count=told.get("lag_count", 0),
            lag_sum_ns=told.get("lag_sum_ns", 0),
        )

    async def drain(self) -> None:
        """Returns when all front ends have let their connections end (rule 4)."""
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for life in self._lives:
            if life is not None:
                life.frames.send(Kind.DRAIN)
        while any(life is not None for life in self._lives):
            await self._changed.wait()
