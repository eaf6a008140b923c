"""A loaded model version: its backend, its instances and its scheduler.

In order: Model.load() reads files on a loader thread; start() makes the instances on the trio thread and waits for
their initialize(); drain() waits until the last accepted request is answered; stop() finalizes the instances
when their last batch is back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import trio

from neptrio.config import groups, labels, openai, output_checks
from neptrio.config import model_config as model_config
from neptrio.config.groups import Placement
from neptrio.config.timing import tells_times
from neptrio.errors import Internal, TritonError
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.batch import complete
from neptrio.execution.instance import Instance, InstancePool
from neptrio.loop import threads
from neptrio.loop.mailbox import CompletionQueue
from neptrio.loop.slices import Slices
from neptrio.observe.counters import ModelCounters
from neptrio.observe.memory import Measured, usage
from neptrio.observe.metrics_config import MetricsConfig
from neptrio.repository.warmup import warm_up
from neptrio.request import reshape
from neptrio.request.infer_request import DataType, InferRequest, InferResponse
from neptrio.scheduling.base import NO_SCHEDULER, LoopServices, Scheduler, ServedModel
from neptrio.scheduling.choose import make_scheduler

log = logging.getLogger("neptrio.model")


class _Question:
    """A model's is_ready() under way, and those who wait for it."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.ready = False


class Model(ServedModel):
    """One version of one model."""

    scheduler: Scheduler | None

    def __init__(
        self, context: LoadContext, backend: Backend, loop: LoopServices, completions: CompletionQueue
    ) -> None:
        super().__init__(context.name, str(context.version))
        config = context.config
        self.config = config
        self.written: Any = None  # inference.ModelConfig as it was given, None where nobody has said
        self.context = context
        self.backend = backend
        self.platform = config.platform or backend.platform or config.backend
        self.max_batch_size = config.max_batch_size
        self.set_inputs(model_config.input_specs(config))
        self.output_names = {o.name for o in config.output}
        self.labels = labels.read(context.model_dir, config)
        self.input_reshapes = reshape.of_inputs(config) or None
        output_reshapes = reshape.of_outputs(config)
        if output_reshapes:
            self.reshape_outputs = reshape.output_reshaper(output_reshapes)
        self.decoupled = config.model_transaction_policy.decoupled
        self.tells_times = tells_times(config)
        self.openai = openai.mapping(config, context.model_dir)
        # outputs that are fed back as implicit state: made whatever the client asked for
        self.state_outputs = ()
        self.counters = ModelCounters()
        self.check_outputs = output_checks.mode(config, context.settings.backend_settings(config.backend))
        self.told_of_outputs: set[str] = set()  # what the log has said of answers that are not as configured
        self._question: _Question | None = None  # while the instances are asked is_ready()
        self.load_duration_secs = 0.0
        self.loaded_at_ms = 0  # milliseconds since the epoch, like last_inference of the statistics
        self.cpu_bytes = 0  # of this process: what its load took
        self.least_bytes = 0  # what its files take of this process, whatever was measured
        self.least_device_bytes: dict[int, int] = {}  # GPU -> the same of its memory
        self.device_bytes: dict[int, int] = {}  # GPU -> what is held there
        self.host_bytes = 0  # of the host's memory, of this process and its own
        self._process_bytes: dict[str, int] = {}  # instance -> what its process held when it had started
        self.pool = InstancePool(loop.loop_pass)
        self._loop = loop
        self._completions = completions
        self._idle = trio.Event()
        self.on_idle = None
        self._serving = False
        # of a model that serves: it takes requests (`ready`), and every instance can execute now
        self.ready = self.healthy = False
        # called after `ready` of a model that serves has changed
        self.on_ready: Callable[[], None] = lambda: None
        # what becomes of a request that no instance could begin: whether it waits elsewhere; else it fails
        self.on_not_begun: Callable[[InferRequest], bool] = lambda request: False
        self.stuck = False  # initialize() hangs, so nobody can wait for stop()

    def measured(self, measured: Measured) -> None:
        """Notes what the load took: seconds, and memory as the statistics extension reports it."""
        self.load_duration_secs = measured.seconds
        self.loaded_at_ms = int(time.time() * 1000)
        self.cpu_bytes = measured.cpu_bytes
        self.memory_changed()

    def memory_changed(self) -> None:
        """The memory use of an instance has changed while it serves."""
        processes = sum(self._process_bytes.get(instance.name, 0) for instance in self.pool.all)
        own = self.backend.memory_usage()
        cpu_bytes = self.cpu_bytes + processes
        pinned = sum(size for kind, _, size in own if kind.startswith("CPU"))
        self.host_bytes = max(cpu_bytes + pinned, self.least_bytes)
        self.device_bytes = dict(self.least_device_bytes)
        for device in {id_ for kind, id_, _ in own if kind == "GPU"}:
            size = sum(size for kind, id_, size in own if (kind, id_) == ("GPU", device))
            self.device_bytes[device] = max(size, self.device_bytes.get(device, 0))
        found = usage(cpu_bytes, own)
        if found != self.counters.memory_usage:
            self.counters.memory_usage = found

    def measure_processes(self, again: bool = False) -> None:
        """Looks how much the processes of instances hold that have been initialized since it last did, or all of them. A
        loader thread."""
        known = {} if again else self._process_bytes
        self._process_bytes = {
            instance.name: known[instance.name]
            if instance.name in known
            else instance.backend.process_memory()
            for instance in list(self.pool.all)
        }

    @cached_property
    def known_outputs(self) -> frozenset[str]:
        """The outputs that a response may hold when the client asked for none in particular: those of the
        configuration and those that are implicit state."""
        return frozenset((*self.output_names, *self.state_outputs))

    @cached_property
    def output_types(self) -> dict[str, tuple[int, int]]:
        """Datatype and number of dimensions of each output as the configuration has them, -1 for any number."""
        row = 1 if self.max_batch_size > 0 else 0
        dims = {o.name: o.reshape.shape if o.HasField("reshape") else o.dims for o in self.config.output}
        return {
            o.name: (int(o.data_type), len(dims[o.name]) + row if o.dims else -1) for o in self.config.output
        }

    @cached_property
    def _has_strings(self) -> bool:
        return any(spec.dtype == DataType.DT_BYTES for spec in self.input_specs)

    def body_source(self) -> Any:
        """What makes memory for the binary tensors of one request to this model while it is received: a function of a
        number of bytes, whose result is a writable buffer or None. None if there is no such memory. Trio thread.

        Each instance has memory of its own, and what lies there may be changed by that instance's process. Of several
        instances it is the one that would be given a batch now; if another executes the request, its tensors are
        copied there. Strings must not lie there (cext/rings/body_area).
        """
        if not self.ready or self._has_strings:
            return None
        instances = self.pool.instances
        instance = instances[0] if len(instances) == 1 else self.pool.promised()
        return None if instance is None else instance.backend.body_memory

    @property
    def takes_device_memory(self) -> bool:
        """True when every instance reads inputs in device memory in place."""
        instances = self.pool.instances
        return bool(instances) and all(i.backend.takes_device_memory for i in instances)

    @property
    def lost(self) -> bool:
        """True when it has stopped serving for good, until a load makes it anew."""
        return any(i.backend.lost for i in self.pool.instances)

    def remeasured(self, measured: Measured) -> None:
        """Adds the memory that new instances took to what the load took."""
        self.cpu_bytes += measured.cpu_bytes
        self.memory_changed()

    async def start(self, tell: Callable[[str], None] = lambda phase: None) -> None:
        """Makes and initializes the instances, in parallel, and warms them up; `tell` is called with each phase's name.

        Raises what initialize() raised, after stopping what was made. When the model is `stuck`, the caller must
        stop it instead.
        """
        try:
            places = list(groups.placements(self.config))
            slices = Slices()  # an instance takes some tenths of a millisecond, and there may be hundreds
            for place, name in zip(places, groups.names(places, ()), strict=True):
                instance = self.make_instance(place, name)
                self.pool.add(instance, self._loop.rate_limiter, place.group, place.device)
                with trio.CancelScope(shield=True):  # half-made is nothing that a caller could stop
                    await slices.rest()
            self.scheduler = make_scheduler(self, self.pool, self._loop)
            # after the scheduler was made: only then does an ensemble know whether one of its steps is decoupled
            MetricsConfig.parse(self.context.settings.metrics_config).apply(self.counters, self.config)
        except BaseException:
            self._let_go()
            self.backend.unload()
            raise
        tell("initializing instances")
        try:
            await self.start_instances(self.pool.all)
        except TooLong:
            self.stuck = True
            raise
        except Exception:
            await self.stop()
            raise
        if self.config.model_warmup:
            tell("warming up")
        try:
            await warm_up(self, self.pool.instances)
        except Exception:  # a cancelled caller stops the model itself, since that may take long
            with trio.CancelScope(shield=True):
                await self.stop()
            raise
        self._serving = True
        self.health_changed()

    def make_instance(self, placement: Placement, name: str) -> Instance:
        """A new instance that is not started. Raises what the backend raises."""
        made = self.backend.create_instance(name, placement.kind, placement.device)
        made.tell(self)
        instance = Instance(name, self, made, self._completions, self.pool)
        instance.placement = placement
        return instance

    async def start_instances(self, instances: list[Instance]) -> None:
        """Initializes instances in parallel. When all are done, raises the first TritonError; raises TooLong when
        some exceed the backend's time limit."""
        errors: list[BaseException] = []
        limit = self.backend.time_limit(self.context)
        with trio.move_on_after(math.inf if limit is None else limit) as scope:
            with suppress(
                threads.NoThread
            ):  # what has no thread yet tries once more, and says why it cannot have one
                await threads.run(_begin_threads, instances, limiter=trio.CapacityLimiter(1))
            async with trio.open_nursery() as nursery:
                for instance in instances:
                    nursery.start_soon(self._start_instance, instance, errors)
        if scope.cancelled_caught:
            raise too_long("initialize", self.context, limit)
        if errors:
            raise errors[0]
        self.pool.share(instances)

    def exchange(self, config: Any, added: list[Instance], retired: list[Instance]) -> None:
        """A change in place: takes over the instance groups and version policy of `config`, and swaps instances."""
        groups.take_over(self.config, config)
        self.pool.exchange(added, retired)
        self.health_changed()

    def health_changed(self) -> None:
        """Updates `ready` and `healthy`. Called when an instance's health changes.

        A model with an instance that can execute, or is about to, takes requests. One with sequences, each of which belongs
        to an instance, does so only where that is true of all."""
        able = self.pool.health_changed()
        if self._serving:
            backends = [instance.backend for instance in self.pool.instances]
            self.healthy = all(backend.healthy for backend in backends)
            if self.config.HasField("sequence_batching"):
                able = all(backend.healthy or backend.returning for backend in backends)
            self.ready = able or not backends
            self.on_ready()
        self.pass_soon()

    def take_back(self, request: InferRequest) -> bool:
        """Other instances execute it, or it waits elsewhere. Not one of a sequence, whose state may be gone, nor a model's call,
        for which the instances that are left may wait, nor one that nobody wants."""
        scheduler = self.scheduler
        if scheduler is None or scheduler.of_sequences is not None or request.cancelled or _called(request):
            return False
        if not self.ready:
            return self.on_not_begun(request)
        request.batch = request.on_cancel = None
        try:
            scheduler.requeue(request)
        except TritonError as error:
            complete(request, InferResponse(None, error), True)
        return True

    def state_lost(self, backend: BackendInstance, error: TritonError) -> None:
        """What an instance has kept in its process is gone."""
        for instance in self.pool.instances + self.pool.retiring:
            if instance.backend is backend:
                self.pool.on_lost(instance, error)

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        """A backend has reported the durations of a response itself."""
        self.counters.measured(place, outcome, computing_ns, output_ns)

    @property
    def reason(self) -> str:
        """Why a model that should serve is not ready, "" when it is."""
        return next((i.backend.reason for i in self.pool.instances if i.backend.reason), "")

    def pass_soon(self) -> None:
        """Has the loop pass ended soon: something was decided outside of a pass."""
        self._loop.loop_pass.soon()

    async def _start_instance(self, instance: Instance, errors: list[BaseException]) -> None:
        error = await _started(instance)
        if error is not None:
            if isinstance(error, TritonError):
                errors.append(error)
            else:
                errors.append(Internal(instance.backend.describe_failure(error).message))

    async def is_ready(self) -> bool:
        """Asks the instances whether they can serve; one that does not answer in time counts as not ready.

        A caller who comes while an answer is awaited waits for the same one, even if the caller who asked has given
        up: a model that hangs must not take a thread with every question.
        """
        if not self.healthy:
            return False
        asked = [
            i.backend for i in self.pool.instances if type(i.backend).is_ready is not BackendInstance.is_ready
        ]
        if not asked:
            return True

        if self._question is None:
            self._question = _Question()
            trio.lowlevel.spawn_system_task(self._ask, self._question, asked)
        question = self._question
        with trio.move_on_after(max(backend.ready_seconds for backend in asked)):
            await question.answered.wait()
        return question.ready

    async def _ask(self, question: _Question, asked: list[BackendInstance]) -> None:
        def ask() -> bool:
            try:
                return all(backend.is_ready() for backend in asked)
            except BaseException:  # SystemExit, too, is a model's answer
                log.exception("is_ready of model '%s' failed", self.name)
                return False

        try:
            question.ready = await threads.run(ask, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        except threads.NoThread as error:  # so it counts as not ready
            log.warning("model '%s' cannot be asked whether it is ready: %s", self.name, error)
        finally:
            self._question = None
            question.answered.set()

    def abort(self) -> None:
        """The load was abandoned: initialize() should stop early; stop() follows."""
        for instance in self.pool.all:
            instance.backend.abort()

    def withdraw(self) -> None:
        """Refuses new requests; drain() and stop() follow."""
        self._serving = self.ready = self.healthy = False

    async def drain(self) -> None:
        """Returns when all accepted requests are answered."""
        self._serving = self.ready = self.healthy = False
        if self.scheduler is not None:
            self.scheduler.stop()
        while self.inflight:
            self._idle = trio.Event()
            self.on_idle = self._idle.set
            await self._idle.wait()
        self.on_idle = None

    async def stop(self) -> None:
        """Finalizes every instance and unloads the backend."""
        self._serving = self.ready = self.healthy = False
        await self.pool.batches_back()
        if self.scheduler is not None:
            self.scheduler.close()
        await self.pool.stop()
        self._let_go()
        self.pass_soon()
        self.backend.unload()

    def _let_go(self) -> None:
        """Drops what refers back to the model, so that reference counts free all of it: a collection of cycles would stop
        the loop for as long as it takes to look at every model of the server."""
        self.pool.clear()
        self.scheduler = NO_SCHEDULER


class TooLong(Internal):
    """A model's code did not return in time."""


def too_long(what: str, context: LoadContext, limit: float | None) -> TooLong:
    """The error of a load that hangs in a model's code."""
    return TooLong(
        f"{what} of model '{context.name}' version {context.version} did not return within {limit:g} s "
        "(INITIALIZE_TIMEOUT_SECONDS); its thread is left behind. With the parameter isolation 'process' a model "
        "that hangs can be ended"
    )


def _called(request: InferRequest) -> bool:
    """Whether a model's call is what the request comes from."""
    parent = request.parent
    while parent is not None and parent.composing:
        parent = parent.parent
    return parent is not None


def _begin_threads(instances: list[Instance]) -> None:
    """One after the other, aside: of each it is waited for. Raises NoThread."""
    for instance in instances:
        instance.begin_thread()


async def _started(instance: Instance) -> BaseException | None:
    """Starts an instance and waits for the end of its initialize(); returns the error or None."""
    finished = trio.Event()
    outcome: list[BaseException | None] = []

    def done(error: BaseException | None) -> None:
        outcome.append(error)
        finished.set()

    instance.start(done)
    await finished.wait()
    return outcome[0]
