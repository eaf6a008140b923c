"""All nurseries of the server: what is started in which order, and how it is shut down.

    loop pass, timers, completions        the loop's own tasks
      models                              loaded before the listeners accept
        REST, gRPC, metrics, admin        the listeners

Shutdown goes the other way: readiness is false at once; new sequences are refused, and live ones end by their clients
or their idle time; no new connections; open requests are answered; models are unloaded; the loop's own tasks end. A second
signal ends the process at once.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from neptrio import process_parts, startup
from neptrio.codec.inflate_budget import InflateBudget
from neptrio.config import accelerators
from neptrio.errors import InvalidArgument, TritonError
from neptrio.execution.admission import Admission
from neptrio.execution.foreign_inputs import ForeignInputs
from neptrio.execution.model_host import ModelHost
from neptrio.execution.rate_limiter import RateLimiter
from neptrio.loop import collector, open_files, periodic, threads
from neptrio.loop.doorbells import Doorbells
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.mailbox import CompletionQueue
from neptrio.loop.poller import Poller
from neptrio.loop.socket_writer import listen
from neptrio.loop.timers import Timers
from neptrio.loop.workers import Workers
from neptrio.observe.machine import HostSampler
from neptrio.observe.metrics import Metrics
from neptrio.observe.metrics_config import MetricsConfig
from neptrio.observe.model_families import Detail
from neptrio.observe.tracer import Tracer
from neptrio.repository.manager import RepositoryManager
from neptrio.scheduling.base import LoopServices
from neptrio.scheduling.cache_config import parse_config
from neptrio.scheduling.cache_elsewhere import CacheElsewhere
from neptrio.scheduling.response_cache import Cache, ResponseCache
from neptrio.service import Services, Verbs
from neptrio.service.access_log import AccessLog
from neptrio.service.audit import AuditLog
from neptrio.service.connections import Connections
from neptrio.service.described import described
from neptrio.service.held_bytes import HeldBytes
from neptrio.service.logging import LoggingService
from neptrio.service.metadata import MetadataService
from neptrio.service.recent_log import RecentLog
from neptrio.service.repository import RepositoryService
from neptrio.service.request_limits import RequestLimits
from neptrio.service.sequences import SequencesService
from neptrio.service.shared_memory import SharedMemoryService
from neptrio.service.statistics import StatisticsService
from neptrio.service.tokens import LOOK_SECONDS, Tokens
from neptrio.service.trace import TraceService
from neptrio.settings import Settings
from neptrio.terminal import counted
from neptrio.transport.admin_server import AdminServer
from neptrio.transport.console import Ports
from neptrio.transport.grpc.server import GrpcServer
from neptrio.transport.metrics_server import MetricsServer
from neptrio.transport.rest import app_call
from neptrio.transport.rest_server import RestServer

if TYPE_CHECKING:
    from neptrio.frontend.engine import FrontEnds

log = logging.getLogger("neptrio.server")

SEQUENCES_PERIOD = 0.05  # seconds between checks of the sequences that delay a shutdown
REST_OF_SHUTDOWN = 5.0  # seconds kept for open requests and unloading, if the exit timeout is longer


class Server:
    """The server. It can be embedded: it does not assume that the process is its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        loop_pass = LoopPass()
        limiter = None
        if settings.rate_limit == "execution_count":
            limiter = RateLimiter(loop_pass, {(r[0], r[1]): r[2] for r in settings.rate_limit_resource})
        timers = Timers(loop_pass)
        self.completions = CompletionQueue()
        cache = _made_cache(settings, timers, self.completions)
        self._cache = cache if isinstance(cache, CacheElsewhere) else None
        lag = LoopLag()
        self.loop = LoopServices(
            loop_pass=loop_pass,
            timers=timers,
            poller=Poller(loop_pass, timers, lag),
            lag=lag,
            rate_limiter=limiter,
            cache=cache,
        )
        workers = Workers()
        held = HeldBytes(settings.max_held_bytes)
        self._foreign_inputs = ForeignInputs(workers, held)
        inflating = InflateBudget(workers)
        self.tracer = Tracer(settings.trace_options(), loop_pass, self.completions)
        self.shared_memory = SharedMemoryService(settings)
        self.repository = RepositoryManager(settings, self.loop, self.completions, self._host)
        self.tokens = self._tokens()
        self.services = Services(
            settings=settings,
            loop=self.loop,
            admission=self.repository.host.admission,
            workers=workers,
            inflating=inflating,
            request_limits=RequestLimits(
                settings.max_requests_per_second_per_address, settings.max_concurrent_requests_per_address
            ),
            tokens=self.tokens,
            audit=AuditLog(settings.audit_log) if settings.audit_log else None,
            held=held,
            connections=Connections(
                settings.max_connections, settings.max_connections_per_address, open_files.limit()
            ),
            shared_memory=self.shared_memory,
            access=AccessLog.of(settings),
        )
        self.verbs = Verbs(
            metadata=MetadataService(settings, self.repository),
            statistics=StatisticsService(self.repository, lag),
            repository=RepositoryService(settings, self.repository),
            sequences=SequencesService(settings, self.repository),
            trace=TraceService(settings, self.repository, self.tracer),
            logging=LoggingService(settings, self.repository.host.log_levels),
            recent_log=RecentLog(settings),
            cache=cache,
            custom_metrics=self.repository.host.custom_metrics,
        )
        held.add(lambda: inflating.held)
        self.stopping = trio.Event()
        self.fronts: list[Any] = []
        self.http_listener: socket.socket | None = None
        self.grpc_listener: socket.socket | None = None
        self.metrics_listener: socket.socket | None = None
        self.admin: AdminServer | None = None
        self.console = False  # the metrics port serves the console
        self.front_ends: FrontEnds | None = None
        self.metrics = Metrics(
            self.repository.each_ready,
            self.services,
            self.verbs,
            MetricsConfig.parse(settings.metrics_config),
            Detail(settings.metrics_detail),
        )
        self.metrics.demand = self.repository.demand_view
        self.failed_start = ""  # what there is to say of a start that ended because models failed to load
        self.device_failed = False  # it ends because a GPU cannot be used any more
        self.timed_out = False  # the exit timeout has expired before everything had ended
        self.abandoned = False  # threads may still run: models were loading, or a device has failed
        self._deadline: float | None = None
        self._loading = trio.CancelScope()

    def _tokens(self) -> Tokens | None:
        path = self.settings.auth_config
        if path is None:
            return None
        try:
            return Tokens(path)
        except ValueError as error:
            raise InvalidArgument(f"--auth-config: {error}") from None

    async def _watch_tokens(self, tokens: Tokens) -> None:
        """Reads the file of tokens again and again, on a thread, because it may be on a slow file system."""

        async def look() -> None:
            changed = None
            with suppress(threads.NoThread):
                changed = await threads.run(tokens.changed, abandon_on_cancel=True)
            if changed is not None:
                tokens.take(changed)
                if self.front_ends is not None:
                    await self.front_ends.announce()
                tokens.tell()

        await periodic.for_ever(LOOK_SECONDS, look, "--auth-config: looking at the file", log)

    def _host(self, repository: RepositoryManager) -> ModelHost:
        """Makes the objects that models' code calls back into. Called before the first model is made."""
        return ModelHost(
            admission=Admission(repository, self.tracer),
            completions=self.completions,
            shared_memory=self.shared_memory,
            repository=RepositoryService(self.settings, repository, of_models=True),
            timers=self.loop.timers,
            doorbells=Doorbells(self.loop.poller),
            foreign_inputs=self._foreign_inputs,
            spans=self.tracer.options,
            describe=self._described,
            device_failed=self._device_failed,
        )

    def _described(self, subject: str, name: str, version: str) -> Awaitable[str]:
        metrics = self.metrics.document if self.settings.allow_metrics else None
        return described(self.verbs, metrics, subject, name, version)

    def _device_failed(self, why: str) -> None:
        if self.settings.exit_on_device_error and not self.stopping.is_set():
            log.error("the server ends, because of --exit-on-device-error: %s", why)
            self.device_failed = True
            self.stop()

    async def _completions(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Delivers the work items that instances have finished, many per wake-up."""
        task_status.started()
        await self.loop.poller.read(self.completions.read_fd, self._deliver)

    def _deliver(self) -> bool:
        for item in self.completions.drain():
            try:
                item.deliver()
            except Exception:
                log.exception("a completion failed")
        return True

    async def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Loads the models, serves until stop() is called, drains and unloads."""
        try:
            await self._serve(started)
        finally:
            self.completions.close()
        log.info("stopped")

    async def _serve(self, started: Callable[[], None]) -> None:
        async with trio.open_nursery() as core:
            await core.start(self.loop.loop_pass.run)
            await core.start(self.loop.timers.run)
            await core.start(self.loop.poller.run)
            await core.start(self._completions)
            await core.start(self.repository.run)
            if self.tokens is not None:
                core.start_soon(self._watch_tokens, self.tokens)
            try:
                async with trio.open_nursery() as fronts:
                    self._listen()
                    if any(not isinstance(front, GrpcServer) for front in self.fronts):
                        fronts.start_soon(app_call.import_early)
                    open_controls = startup.open_controls(self.settings)
                    if open_controls:
                        log.warning("%s", open_controls)
                    with self._loading:
                        # on a thread: where the driver must be asked, it starts, which may take a second
                        await threads.run_surely(accelerators.gpus, abandon_on_cancel=True)
                        if self._cache is not None:
                            await threads.run_surely(self._cache.begin, abandon_on_cancel=True)
                        try:
                            await self.repository.load_all()
                        except TritonError:
                            self.failed_start = startup.failed(self)  # while the others are still loaded
                            raise
                    if self._loading.cancelled_caught:
                        self.abandoned = True
                        fronts.cancel_scope.cancel()
                    for front in self.fronts:
                        await fronts.start(front.run)
                    if self.settings.model_control_mode == "poll" and self.settings.repository_poll_secs:
                        fronts.start_soon(self.repository.poll)
                    if self.repository.budget is not None:
                        fronts.start_soon(self.repository.budget.watch)
                    if self.settings.model_control_mode == "on-demand" and self.settings.repository_poll_secs:
                        fronts.start_soon(self.repository.watch)
                    started()
                    fronts.start_soon(self._collect)
                    # not set earlier: starting may take long, and the pass in which it ends, and nobody waited for it
                    await trio.lowlevel.checkpoint()
                    self.loop.lag.warning_ns = int(self.settings.loop_lag_warning_ms * 1e6)
                    await self.stopping.wait()
                    await self._sequences()
                    await self._drain()
                    fronts.cancel_scope.cancel()
            finally:
                for listener in (self.http_listener, self.grpc_listener, self.metrics_listener):
                    if listener is not None:
                        listener.close()  # usually closed by their servers, but not if the start fails
                if self.front_ends is not None:
                    self.front_ends.close()
                if self.admin is not None:
                    self.admin.close()
                with trio.CancelScope(shield=True) as scope:
                    scope.deadline = self._deadline or trio.current_time() + self.settings.exit_timeout_secs
                    await self.repository.unload_all()
                    self.services.shared_memory.close()
                    if self._cache is not None:
                        await threads.run_surely(self._cache.close, abandon_on_cancel=True)
                    await self._settle_devices()
                    await self.tracer.close()
                    for each in self.services.logs():
                        await threads.run_surely(each.close, abandon_on_cancel=True)
                self.timed_out = self.timed_out or scope.cancelled_caught
                self.abandoned = self.abandoned or self.repository.left_behind > 0 or _devices_hang()
            core.cancel_scope.cancel()

    async def _settle_devices(self) -> None:
        """Waits until the GPUs have what regions and models held; within the exit timeout."""
        for settle in process_parts.settle:
            await threads.run_surely(settle, abandon_on_cancel=True)

    async def _collect(self) -> None:
        """Growth counts from here on: what the start has made is no reason to look at it (loop.collector, rule 2)."""
        await self.settled()
        await collector.collect(lambda: self.loop.lag.count, lambda: len(self.repository.serving()))

    async def settled(self) -> None:
        """Waits for imports that still run while the server already serves."""
        for front in self.fronts:
            if isinstance(front, GrpcServer):
                await front.handlers_loaded.wait()
        if self.front_ends is not None:
            await self.front_ends.verbs.loaded.wait()

    def _listen(self) -> None:
        settings = self.settings
        metrics_server: MetricsServer | None = None
        if settings.allow_http:
            self.http_listener = _listen_for(
                "http", settings.http_address, settings.http_port, reuse_port=settings.reuse_http_port
            )
            if not settings.frontends:
                self.fronts.append(RestServer(self.services, self.verbs, self.http_listener))
        if settings.allow_grpc:
            self.grpc_listener = _listen_for(
                "grpc", settings.grpc_address, settings.grpc_port, reuse_port=settings.reuse_grpc_port
            )
            if not settings.frontends:
                self.fronts.append(GrpcServer(self.services, self.verbs, self.grpc_listener))
        if settings.frontends:
            from neptrio.frontend.engine import FrontEnds  # which most servers do without

            self.front_ends = FrontEnds(
                self.services, self.verbs, self.repository, self.http_listener, self.grpc_listener
            )
            self.fronts.append(self.front_ends)
            self.metrics.front_ends = self.verbs.statistics.front_ends = self.front_ends.rows
        ports = Ports.of(self.http_listener, self.grpc_listener)
        if settings.allow_metrics:
            sampler = HostSampler(settings.allow_cpu_metrics, settings.allow_gpu_metrics)
            address = settings.metrics_address or settings.http_address
            self.metrics_listener = _listen_for("metrics", address, settings.metrics_port)
            interval = settings.metrics_interval_ms / 1000
            metrics_server = MetricsServer(
                self.services, self.verbs, self.metrics, self.metrics_listener, sampler, interval, ports
            )
            self.console = metrics_server.console is not None
            self.fronts.append(metrics_server)
        if settings.admin_address is not None:
            self.admin = AdminServer(self.services, self.verbs, metrics_server, ports)
            self.fronts.append(self.admin)

    def stop(self) -> None:
        """Begins the shutdown. Trio thread only."""
        if not self.stopping.is_set():
            under_way = sum(m.inflight for m in self.repository.ready_models())
            log.info("stopping: %s under way", counted(under_way, "request"))
        self._deadline = trio.current_time() + self.settings.exit_timeout_secs
        self.verbs.metadata.exiting = True
        self.repository.flush()
        self.stopping.set()
        self._loading.cancel()
        self.repository.close()

    async def _sequences(self) -> None:
        """Lets live sequences go on while a client is connected that could continue them (docs/protocol/rules.md E1.17).

        Some of the exit timeout is kept for the rest of the shutdown. Sequences that idle for longer end then, and the
        exit still counts as clean.
        """
        seconds = self.settings.exit_timeout_secs
        with trio.move_on_after(seconds - max(0.1 * seconds, min(0.5 * seconds, REST_OF_SHUTDOWN))):
            if self.front_ends is not None:
                await self.front_ends.count()
            while self.repository.live_sequences() and any(front.connections for front in self.fronts):
                await trio.sleep(SEQUENCES_PERIOD)

    async def _drain(self) -> None:
        """Accepts no new connections and waits for open requests; the deadline includes the unloading."""
        self.repository.tell_requests()
        with trio.CancelScope(deadline=self._deadline or 0) as scope:
            async with trio.open_nursery() as clock:
                clock.start_soon(self._end_inflating)
                async with trio.open_nursery() as nursery:
                    for front in self.fronts:
                        nursery.start_soon(front.drain)
                clock.cancel_scope.cancel()
        self.timed_out = scope.cancelled_caught

    async def _end_inflating(self) -> None:
        """Gives compressed requests the grace time to be inflated; after that they are refused."""
        await trio.sleep(self.settings.grace_secs)
        self.services.inflating.stop()


def _made_cache(settings: Settings, timers: Timers, completions: CompletionQueue) -> Cache | None:
    """The response cache that the settings ask for. Raises InvalidArgument, or Unsupported."""
    if not settings.cache_config:
        return None
    config = parse_config(settings.cache_config)
    if not config.compiled:
        return ResponseCache(config.size, config.coalesce)
    from neptrio.backends.compiled.cache import compiled_cache  # which most servers do without

    return compiled_cache(config, settings, timers, completions)


def _listen_for(what: str, address: str, port: int, reuse_port: bool = False) -> socket.socket:
    """A listening socket. Raises OSError naming the address and the flag that changes it."""
    try:
        return listen(address, port, reuse_port=reuse_port)
    except OSError as error:
        # numbers below 0 are getaddrinfo's: there is no such name
        no_address = error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0
        flag = f"--{what}-{'address' if no_address else 'port'}"
        raise OSError(f"{error.strerror} ({flag} chooses another one)") from None


def _devices_hang() -> bool:
    """Whether something hangs on a GPU, or what it holds is not released: the end of the interpreter might wait for it."""
    return any(hangs() for hangs in process_parts.hang)
