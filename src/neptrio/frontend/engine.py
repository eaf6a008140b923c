"""The engine's side: starts front ends, restarts those that end, and drains them. Each of their processes is a Life.

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
from neptrio.frontend.frames import Kind
from neptrio.frontend.life import START_SECONDS, Life
from neptrio.frontend.model_table import ModelTable
from neptrio.frontend.template import Template
from neptrio.frontend.turns import Counts
from neptrio.frontend.verbs import ForwardedVerbs
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
        self.verbs = ForwardedVerbs(services, verbs, address, self.announce)
        self.template = Template(services.settings)
        self.counts, self._counts_descriptor = Counts.create(services.settings.frontends)
        self._lives: list[Life | None] = [None] * services.settings.frontends
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
        return not any(life.end.under_way for life in self._lives if life is not None)

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
        for life in self._lives:
            if life is not None and not life.ended and life.knows_models:
                self._send(life, news, table)

    def tell(self, life: Life) -> None:
        """Sends everything to a front end that starts."""
        self._renew()
        life.knows_models = True
        self._send(life, self._clients, self._table(None))

    def _table(self, models: list[str] | None) -> bytes:
        """The settings and these models, None: all that serve, in place of what was known."""
        whole = b"true" if models is None else b"false"
        document = self._models.document(models)
        return b'{"whole":%b,"settings":%b,"models":%b}' % (whole, self._settings, document)

    def _send(self, life: Life, clients: AuthConfig | None, table: bytes) -> None:
        if clients is not None:
            life.frames.send(Kind.CLIENTS, 0, pickle.dumps(clients))
        life.frames.send(Kind.TABLE, self._generation, table)

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
        generation = self._generation
        with trio.move_on_after(ANNOUNCE_SECONDS):
            while self._behind(generation):
                await self._changed.wait()
        for life in self._behind(generation):
            life.violated(f"it has not taken what changed within {ANNOUNCE_SECONDS:g} s")

    def _behind(self, generation: int) -> list[Life]:
        """Those that serve and do not use that table yet."""
        return [
            life
            for life in self._lives
            if life is not None and life.ready.is_set() and not life.ended and life.known < generation
        ]

    async def _watch(self) -> None:
        """Tells front ends of changes that came about in another way than through them."""
        notifier = self._repository.readiness
        while True:
            seen = notifier.notified
            self._renew()
            for life in self._lives:
                if life is not None and not life.ended:
                    life.end.look()
            with trio.move_on_after(LOOK_SECONDS):
                await notifier.wait(seen)

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
                life = self._lives[number] = Life(self, number)
                await life.run()
                what = f"(process {life.pid}) has ended"
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
        """Returns when all front ends have let their connections end (rule 3)."""
        self._draining.set()
        for listener in self._listeners:
            listener.close()
        for life in self._lives:
            if life is not None:
                life.frames.send(Kind.DRAIN)
        while any(life is not None for life in self._lives):
            await self._changed.wait()
