"""The engine's side: starts front ends, restarts those that end, and drains them. Each of their processes is a FrontEndSession.

Rules:
 1. For a front end that has ended another is started after a pause that doubles, up to LONGEST_PAUSE; one that lived for
    SETTLED seconds starts over.
 2. What a front end knows of models (the table) has a generation. announce() returns when every front end uses the newest.
    One that does not within ANNOUNCE_SECONDS hangs and is killed: others wait, and it may still let in who was shut out.
 3. drain(): the listening sockets are closed here first; then each front end closes its own and lets its connections end.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import time

import trio

from neptrio.backends.python.template import SUPPORTED as CAN_CLONE
from neptrio.errors import Internal, Unsupported
from neptrio.frontend.connection_balance import ConnectionCounts
from neptrio.frontend.frames import Kind
from neptrio.frontend.front_end_session import START_SECONDS, FrontEndSession
from neptrio.frontend.model_table import ModelTable
from neptrio.frontend.template import Template
from neptrio.frontend.verbs import ForwardedVerbs
from neptrio.loop import periodic
from neptrio.loop.busy_poll import BusyPoll, granted_ns
from neptrio.observe.front_ends import FrontEndRow
from neptrio.observe.processes import use
from neptrio.repository.manager import RepositoryManager
from neptrio.rings.ring import SUPPORTED as CAN_SHARE
from neptrio.service import Services, Verbs
from neptrio.service.auth_config import AuthConfig

log = logging.getLogger("neptrio.frontend")

FIRST_PAUSE, LONGEST_PAUSE, SETTLED = 0.1, 30.0, 60.0  # seconds
ANNOUNCE_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two looks at what front ends should know


class FrontEnds:
    """All front ends; one of the server's fronts."""

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        repository: RepositoryManager,
        http: socket.socket | None,
        grpc: socket.socket | None,
    ) -> None:
        """Starts the template. Raises OSError, and Unsupported where the system lacks what front ends need."""
        if not (CAN_CLONE and CAN_SHARE):
            raise Unsupported("--frontends needs Linux on x86-64 or ARM64")
        self.services = services
        self._logging = verbs.logging
        self._repository = repository
        self._listeners = [listener for listener in (http, grpc) if listener is not None]
        address = str(http.getsockname()[0]) if http is not None else ""
        self.verbs = ForwardedVerbs(services, verbs, address)
        verbs.changes.announce = self.announce
        self.template = Template(services.settings)
        self.counts, self._counts_descriptor = ConnectionCounts.create(services.settings.frontends)
        self._sessions: list[FrontEndSession | None] = [None] * services.settings.frontends
        self._restarts = [0] * services.settings.frontends
        looks_ns = granted_ns(services.settings.busy_poll_us)
        self.busy_poll = BusyPoll(looks_ns, self._nothing_under_way)
        if looks_ns:
            services.loop.poller.busy_poll = self.busy_poll
        self._draining = trio.Event()
        self._changed = trio.Event()
        self._models = ModelTable(repository)
        self._settings = b""
        self._clients: AuthConfig | None = None
        services.connections.on_press = self.press
        self._generation = 0
        self._questions = 0

    def _nothing_under_way(self) -> bool:
        """Whoever has answered everything expects the next request."""
        return not any(session.end.under_way for session in self._sessions if session is not None)

    def passed(self) -> list[int]:
        """What every front end is given: the table of connections and the listening sockets, as descriptors."""
        return [self._counts_descriptor, *(listener.fileno() for listener in self._listeners)]

    def changed(self) -> None:
        """Somebody's state has changed: those who wait look again."""
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------ what front ends know

    def _told_settings(self) -> bytes:
        tracer = self.services.admission.tracer
        told = {
            "tracing": bool(tracer.tracing),
            "trace_headers": bool(tracer.trace_headers),
            "logging": self._logging.settings(),
        }
        return json.dumps(told).encode()

    def _renew(self) -> None:
        models = self._models.renew()
        settings = self._told_settings()
        tokens = self.services.tokens
        clients = None if tokens is None else tokens.config
        if not models and settings == self._settings and clients is self._clients:
            return
        news = clients if clients is not self._clients else None
        self._settings = settings
        self._clients = clients
        self._generation += 1
        table = self._table(models)
        for session in self._sessions:
            if session is not None and not session.ended and session.knows_models:
                self._send(session, news, table)

    def tell(self, session: FrontEndSession) -> None:
        """Sends everything to a front end that starts."""
        self._renew()
        session.knows_models = True
        self._send(session, self._clients, self._table(None))

    def _table(self, models: list[str] | None) -> bytes:
        """The settings and these models, None: all that serve, in place of what was known."""
        whole = b"true" if models is None else b"false"
        document = self._models.document(models)
        return b'{"whole":%b,"settings":%b,"models":%b}' % (whole, self._settings, document)

    def _send(self, session: FrontEndSession, clients: AuthConfig | None, table: bytes) -> None:
        if clients is not None:
            session.frames.send(Kind.CLIENTS, 0, pickle.dumps(clients))
        session.frames.send(Kind.TABLE, self._generation, table)

    def press(self) -> None:
        """There is no room for connections: front ends let idle ones end soon."""
        for session in self._sessions:
            if session is not None and not session.ended:
                session.frames.send(Kind.PRESSED)

    def reopen(self) -> None:
        """Has front ends open the log's file again."""
        for session in self._sessions:
            if session is not None and not session.ended:
                session.frames.send(Kind.REOPEN)

    async def announce(self) -> None:
        """Returns when every front end knows the models, settings and clients that there are now."""
        self._renew()
        generation = self._generation
        with trio.move_on_after(ANNOUNCE_SECONDS):
            while self._behind(generation):
                await self._changed.wait()
        for session in self._behind(generation):
            session.violated(f"it has not taken what changed within {ANNOUNCE_SECONDS:g} s")

    def _behind(self, generation: int) -> list[FrontEndSession]:
        """Those that serve and do not use that table yet."""
        return [
            session
            for session in self._sessions
            if session is not None
            and session.ready.is_set()
            and not session.ended
            and session.known < generation
        ]

    async def _watch(self) -> None:
        """Tells front ends of changes that came about in another way than through them."""
        notifier, seen = self._repository.readiness, -1

        async def look() -> None:
            nonlocal seen
            seen = notifier.notified
            self._renew()
            for session in self._sessions:
                if session is not None and not session.ended:
                    session.end.look()

        async def news(seconds: float) -> None:
            with trio.move_on_after(seconds):
                await notifier.wait(seen)

        await periodic.for_ever(LOOK_SECONDS, look, "telling front ends what has changed", log, news)

    # ------------------------------------------------------------ their sessions

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Starts the front ends, and keeps as many until it is cancelled or drain() has ended them."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.verbs.load)
                nursery.start_soon(self._watch)
                for number in range(len(self._sessions)):
                    nursery.start_soon(self._keep, number)
                with trio.move_on_after(START_SECONDS) as scope:
                    while not all(
                        session is not None and session.ready.is_set() for session in self._sessions
                    ):
                        await self._changed.wait()
                if scope.cancelled_caught:
                    raise Internal(f"the front ends did not start within {START_SECONDS:g} s")
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the template and closes what was kept for new front ends, if that has not been done."""
        self.template.close()
        if self._counts_descriptor >= 0:
            os.close(self._counts_descriptor)
            self._counts_descriptor = -1
        for listener in self._listeners:
            listener.close()

    async def _keep(self, number: int) -> None:
        pause = FIRST_PAUSE
        while not self._draining.is_set():
            begun = time.monotonic()
            what = "cannot be started"
            try:
                session = self._sessions[number] = FrontEndSession(self, number)
                await session.run()
                what = f"(process {session.pid}) has ended"
            except OSError as error:
                what += f": {error}"
            self.changed()
            if self._draining.is_set():
                break
            if time.monotonic() - begun > SETTLED:
                pause = FIRST_PAUSE
            log.error("front end %d %s; the next starts in %g s", number, what, pause)
            with trio.move_on_after(pause):
                await self._draining.wait()
            pause = min(2 * pause, LONGEST_PAUSE)
            self._restarts[number] += 1
        self._sessions[number] = None
        self.changed()

    @property
    def connections(self) -> int:
        """How many connections are open, as of the last rows."""
        return sum(
            session.row.get("connections", 0)
            for session in self._sessions
            if session is not None and not session.ended
        )

    async def count(self) -> None:
        """Returns when `connections` is true as of this call or later."""
        self._questions += 1
        question = self._questions
        sessions = [session for session in self._sessions if session is not None and session.ready.is_set()]
        for session in sessions:
            session.frames.send(Kind.ASK, question)
        while any(not session.ended and session.told < question for session in sessions):
            await self._changed.wait()

    def rows(self) -> list[FrontEndRow]:
        """A row for each front end that runs."""
        return [self._row(session) for session in self._sessions if session is not None and not session.ended]

    def _row(self, session: FrontEndSession) -> FrontEndRow:
        told = session.row
        resident, seconds = use(session.pid)
        return FrontEndRow(
            number=session.number,
            pid=session.pid,
            restarts=self._restarts[session.number],
            connections=told.get("connections", 0),
            requests=told.get("requests", 0),
            under_way=told.get("under_way", 0),
            held_bytes=told.get("held_bytes", 0),
            shared_bytes=told.get("shared_bytes", 0),
            wakes=session.end.wakes,
            resident_bytes=resident,
            cpu_seconds=seconds,
            lag_cumulative=session.lag,
            lag_count=told.get("lag_count", 0),
            lag_sum_ns=told.get("lag_sum_ns", 0),
        )

    async def drain(self) -> None:
        """Returns when all front ends have let their connections end (rule 3)."""
        self._draining.set()
        for listener in self._listeners:
            listener.close()
        for session in self._sessions:
            if session is not None:
                session.frames.send(Kind.DRAIN)
        while any(session is not None for session in self._sessions):
            await self._changed.wait()
