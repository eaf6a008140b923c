"""The sequence batcher: puts requests into the slot table and carries out what the table decides.

What both strategies have in common is here: the checks at admission, controls and implicit state, deadlines,
cancellation, the end of a sequence, iterative sequences. How batches are formed from the slots is in
sequence_direct and sequence_oldest.

Order of the checks (docs/protocol/rules.md E1.1): type of the id, batch size, missing id, stopping, missing START.
A request that fails one of them counts as never accepted and changes nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from neptrio.config.sequence_config import SequenceConfig
from neptrio.errors import Cancelled, InvalidArgument, Reason, TritonError, Unavailable
from neptrio.execution.batch import Batch, complete
from neptrio.execution.instance import Instance, InstancePool
from neptrio.execution.rate_limiter import Claim
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState, Timestamp, monotonic_ns
from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling import sequence_transitions as transitions
from neptrio.scheduling.base import (
    LoopServices,
    Scheduler,
    SchedulerStatistics,
    SequenceStream,
    ServedModel,
    held_requests,
)
from neptrio.scheduling.sequence_ids import ModelIds
from neptrio.scheduling.sequence_slots import Key, Sequence, SlotTable, SlotTableStatistics, StartMissing
from neptrio.scheduling.sequence_state import ImplicitState
from neptrio.scheduling.sequence_tensors import Controls

log = logging.getLogger("neptrio.sequence")

QUEUED = int(RequestState.QUEUED)
TAKEN = int(RequestState.TAKEN)
DONE = int(RequestState.DONE)
RESCHEDULE = 2  # TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
QUEUE_START = int(Timestamp.QUEUE_START)


@dataclass(frozen=True)
class SequenceStatistics(SchedulerStatistics):
    """What the sequence batcher holds at the moment. `queued` counts requests in slots and in the backlog."""

    table: SlotTableStatistics
    null_requests: int  # null requests that have filled empty slots of batches so far (direct strategy)


@dataclass(frozen=True)
class SequenceRow:
    """One sequence, as the sequences listing shows it. Times are microseconds."""

    id: int | str
    owner: str | None  # the name of the token that it belongs to, None without --auth-config
    state: str  # "slot", "backlog", or "ending": its id is free, accepted requests still run
    instance: str  # "" in the backlog
    slot: int  # -1 in the backlog
    age_us: int
    idle_us: int
    queued: int
    executing: int


class SequenceScheduler(Scheduler):
    """Base class of both strategies; a subclass forms batches in `form(index, instance, now_ns)`."""

    offers = False  # True to have the table list the sequences that have a request to issue
    null_requests = 0
    null_requests_open = 0

    def __init__(
        self, model: ServedModel, pool: InstancePool, loop: LoopServices, config: SequenceConfig
    ) -> None:
        self.config = config
        self.model = model
        self.controls = Controls(config)
        self.state = ImplicitState(config, model.name)
        self._model_ids = ModelIds(self.controls)
        self.table = SlotTable(len(pool.instances), config.slots, config.idle_ns, self.offers)
        self._pool = pool
        self._loop = loop
        self._instances: list[Instance | None] = list(pool.instances)  # by the index that the slot table uses
        self._flights: dict[InferRequest, Sequence] = {}
        self._effects: deque[tuple[int, Any]] = deque()  # of the table, that are not carried out yet
        model.state_outputs = self.state.output_names
        self._made = self.controls.names | self.state.names
        self._server_ids = itertools.count(1)
        self._loss: TritonError | None = None  # why the state of sequences was lost last
        self._stopping = False
        self.delay_ns = config.delay_ns  # 0 once the server is about to exit
        self._timer: Timer | None = None
        self._timer_ns = 0
        # a Triton server's debugging aids: each instance is held until so many requests wait
        hold = held_requests("TRITONSERVER_DELAY_SCHEDULER")
        self._holds = [hold] * len(self._instances)
        self._backlog_hold = held_requests("TRITONSERVER_BACKLOG_DELAY_SCHEDULER")
        pool.on_finished = self._finished
        pool.on_free = self._freed
        pool.on_added = self._added
        pool.on_retired = self._retired
        pool.on_lost = self._lost

    # ------------------------------------------------------------ coming in

    def enqueue(self, request: InferRequest) -> None:
        request.stamp(QUEUE_START)
        if request.sequence_id:
            self.controls.check_id(request)
        if request.batch_size > 1:
            raise InvalidArgument(
                f"inference request to model '{self.model.name}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        if not request.sequence_id:
            if not self.config.iterative:
                raise InvalidArgument(
                    f"inference request to model '{self.model.name}' must specify a non-zero or non-empty "
                    "correlation ID"
                )
            request.sequence_id = self._new_id(request)
            request.sequence_start = True
        if self._stopping and request.sequence_start:
            raise Unavailable(
                "Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
        now = request.timestamp(QUEUE_START)
        try:
            sequence, conflict = self.table.accept(_key(request), request, now)
        except StartMissing:
            raise self._start_missing(request.sequence_id) from None
        if conflict:
            log.warning(
                "sequence %r of model '%s' has a conflict: START on a sequence that has not ended",
                request.sequence_id,
                self.model.name,
            )
        request.state = QUEUED
        request.scheduler = self
        request.scheduler_data = sequence
        if self.config.free_on_disconnect and request.sequence_start:
            self._follow(sequence, request.stream)
        if not self._timer_ns or request.timeout_us:
            self._arm()
        self._loop.loop_pass.mark(self)

    def _new_id(self, request: InferRequest) -> int | str:
        for number in self._server_ids:
            request.sequence_id = made = self.controls.id_of(number)
            if _key(request) not in self.table.live:
                return made
        raise AssertionError("unreachable")

    def _start_missing(self, sequence_id: int | str) -> TritonError:
        return InvalidArgument(
            f"inference request for sequence {sequence_id} to model '{self.model.name}' must specify the START "
            "flag on the first request of the sequence"
        )

    def _follow(self, sequence: Sequence, stream: SequenceStream | None) -> None:
        if sequence.stream is not None:
            sequence.stream.sequences.pop(sequence, None)
        sequence.stream = stream
        if stream is not None:
            stream.sequences[sequence] = self

    def cancel(self, request: InferRequest) -> None:
        sequence = request.scheduler_data
        if sequence is not None:
            self.table.cancel(sequence, request, monotonic_ns())
            self._act()
            self._loop.loop_pass.soon()

    # ------------------------------------------------------------ executing

    def dispatch(self, now_ns: int) -> None:
        waiting = self.table.waiting
        for index, instance in enumerate(self._instances):
            if instance is None or instance.backend.returning:
                continue
            in_line = bool(waiting[index]) and self.form(index, instance, now_ns)
            if instance.claim is not None and not in_line:
                instance.claim.leave()
        if self.table.effects:
            self._act()

    def form(self, index: int, instance: Instance, now_ns: int) -> bool:
        """Forms and submits those batches for one instance that are due; True: one is, and waits for a grant."""
        raise NotImplementedError

    def ask(self, claim: Claim) -> bool:
        """Asks the rate limiter for the grant that a batch needs; False: not yet, dispatch() is called again then.

        Until then its requests wait in their slots, where they can be cancelled and others can join them. Others may be
        answered here, and cancel what was looked at before.
        """
        claim.ask()
        self._pool.serve()
        return claim.granted

    def _issue(self, sequence: Sequence, now_ns: int) -> InferRequest:
        """Takes the sequence's next request and adds controls and state to it."""
        request: InferRequest = self.table.issue(sequence, now_ns)
        request.state = TAKEN
        self._flights[request] = sequence
        if sequence.owner is not None or self._model_ids:
            request.sequence_id = self._model_ids.give(sequence, self.table.live)
        self.controls.attach(request, sequence)
        if self.state:
            request.inputs += self.state.inputs(sequence, request.sequence_start)
        return request

    def _held(self, index: int, waiting: int, backlog: int) -> bool:
        """True while the debugging aid holds this instance, which it does once."""
        hold = self._holds[index]
        if hold and (waiting < hold or backlog < self._backlog_hold):
            return True
        self._holds[index] = 0
        return False

    def _added(self, instance: Instance) -> None:
        self._act()
        now = monotonic_ns()
        index = self.table.add_instance(now)
        if index == len(self._instances):
            self._instances.append(instance)
            self._holds.append(0)
        else:
            self._instances[index] = instance
            self._holds[index] = 0
        self._arm()
        self._loop.loop_pass.mark(self)

    def _retired(self, instance: Instance) -> None:
        instance.kept = True
        self.table.retire_instance(self._instances.index(instance))
        self._act()

    def _lost(self, instance: Instance, error: TritonError) -> None:
        """The instance's process has ended, and with it the state of its sequences, but for what the server keeps."""
        if self.state or instance not in self._instances:
            return  # the process of a retired one that has no sequences left has ended as it should
        self._loss = error
        self.table.lose(self._instances.index(instance), monotonic_ns())
        self._act()
        self._loop.loop_pass.soon()

    def _wait_until(self, when_ns: int) -> None:
        """Has dispatch() called at `when_ns` or earlier."""
        self._arm(when_ns)

    def _freed(self) -> None:
        # with a rate limiter also to give back a grant that is not wanted
        if self._pool.limited or any(self.table.waiting):
            self._loop.loop_pass.mark(self)

    def _finished(self, batch: Batch) -> None:
        """A batch has left its instance and is about to be answered.

        The backend may have taken requests out of it. Those are answered later by the backend, or executed again
        through reschedule(), which may already have been called.
        """
        now = monotonic_ns()
        submitted = batch.submitted
        if self.state and batch.error is None:
            alone = len(submitted) == 1
            for request, response in zip(batch.requests, batch.responses, strict=True):
                self.state.commit(self._flights.get(request), response, alone)
        again: list[tuple[Sequence, InferRequest]] = []
        for request in submitted:
            sequence = self._flights.pop(request, None)
            if sequence is None:
                continue  # a null request
            rescheduled = request.release_flags & RESCHEDULE and batch.error is None and request.state != DONE
            if self.config.iterative and not rescheduled:
                self.table.end(sequence, transitions.END, now)
            self.table.finish(sequence, now)
            if rescheduled and batch.requests is not submitted and request not in batch.requests:
                again.append((sequence, request))
        for sequence, request in again:
            self._requeue(sequence, request)
        if self.table.effects:
            self._act()

    def reschedule(self, request: InferRequest) -> None:
        """Executes a request of an iterative sequence again, now without START and END (E1.16)."""
        sequence = self._flights.get(request)
        if not self.config.iterative:
            super().reschedule(request)
        elif request.state == DONE:
            log.error(
                "model '%s' has answered a request for good and wants to execute it again: it is not executed",
                self.model.name,
            )
        elif sequence is not None:
            request.release_flags = RESCHEDULE  # its batch is not back yet; _finished() will requeue it
        elif request.scheduler_data is None:  # warm-up samples and null requests are executed only once
            complete(request, InferResponse([]), True)
        else:
            self._requeue(request.scheduler_data, request)

    def _requeue(self, sequence: Sequence | None, request: InferRequest) -> None:
        request.release_flags = 0
        request.sequence_start = request.sequence_end = False
        request.inputs = [t for t in request.inputs if t.name not in self._made]
        request.state = QUEUED
        request.batch = None
        if sequence is None or not self.table.requeue(sequence, request, monotonic_ns()):
            complete(request, InferResponse(None, self._start_missing(request.sequence_id)), True)
            return
        self._loop.loop_pass.mark(self)
        if self.table.effects:
            self._act()

    # ------------------------------------------------------------ ending

    def _arm(self, when_ns: int | None = None) -> None:
        """Sets the timer to the table's next deadline, or to `when_ns` if that is earlier."""
        due = self.table.next_deadline()
        if when_ns is not None and (due is None or when_ns < due):
            due = when_ns
        if due is None or (self._timer_ns and self._timer_ns <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = due
        self._timer = self._loop.timers.at(due, self._due)

    def _due(self) -> None:
        self._timer = None
        self._timer_ns = 0
        self.table.expire(monotonic_ns())
        self._act()
        self._loop.loop_pass.mark(self)
        self._arm()

    def _act(self) -> None:
        """Carries out the effects that the table has collected, in their order: who is answered may come back at once and
        have more of them carried out, which begins with those that are left."""
        effects = self._effects
        while True:
            effects.extend(self.table.effects)
            self.table.effects = []
            if not effects:
                break
            kind, subject = effects.popleft()
            if kind == slots.ENDED:
                self._ended(subject)
            elif kind == slots.DRAINED:
                self._drained(subject)
            elif kind == slots.CANCELLED:
                complete(subject, InferResponse(None, Cancelled()), True)
            elif kind == slots.LOST:
                complete(subject, InferResponse(None, self._loss), True)
            else:
                error = Unavailable(
                    "timeout of the corresponding sequence has been expired", reason=Reason.REJECTED
                )
                complete(subject, InferResponse(None, error), True)
        self._loop.loop_pass.mark(self)

    def _ended(self, sequence: Sequence) -> None:
        sequence.states = sequence.corrid = None
        if sequence.stream is not None:
            sequence.stream.sequences.pop(sequence, None)
            sequence.stream = None
        self._model_ids.take_back(sequence)
        instance = self._instances[sequence.instance]
        if sequence.started and instance is not None:
            shown = sequence.id if sequence.shown is None else sequence.shown
            instance.sequence_ended(shown, sequence.reason)

    def _drained(self, index: int) -> None:
        """A retired instance has lost its last sequence: the pool may finalize it."""
        instance, self._instances[index] = self._instances[index], None
        if instance is not None:
            instance.kept = False
            self._pool.note_retired()

    @property
    def of_sequences(self) -> SequenceScheduler:
        return self

    def live_keys(self, sequence_id: int | str) -> list[Key]:
        """The keys of the live sequences with that id: one of each owner that has one."""
        live = self.table.live
        return [
            key for key in live if key == sequence_id or (isinstance(key, tuple) and key[1] == sequence_id)
        ]

    def end_sequence(self, key: Key) -> int | None:
        """Ends a live sequence; its accepted requests still run. Returns how many these are, None if it is not live."""
        sequence = self.table.live.get(key)
        if sequence is None:
            return None
        left = len(sequence.waiting or ()) + (sequence.in_flight is not None)
        self.table.end(sequence, transitions.EVICT, monotonic_ns())
        self._act()
        self._loop.loop_pass.soon()
        return left

    def disconnected(self, sequence: Sequence) -> None:
        """The stream on which the sequence was started has ended, and the model asks to end it then."""
        sequence.stream = None
        self.table.end(sequence, transitions.DISCONNECT, monotonic_ns())
        self._act()
        self._loop.loop_pass.soon()

    def complete_sample(self, request: InferRequest, number: int) -> None:
        """Adds the controls and states that the warm-up sample does not contain."""
        given = {tensor.name for tensor in request.inputs}
        sample = Sequence(self.controls.id_of(number + 1), 0)
        request.scheduler = self
        request.sequence_id = sample.id
        request.sequence_start = request.sequence_end = True
        own = request.inputs
        request.inputs = []
        self.controls.attach(request, sample)
        request.inputs = own + [t for t in request.inputs + self.state.initial if t.name not in given]

    def flush(self) -> None:
        """The server is about to exit: sends batches without waiting for more, and refuses new sequences."""
        self.stop()
        self.delay_ns = 0
        self._holds = [0] * len(self._instances)
        self._loop.loop_pass.mark(self)
        self._loop.loop_pass.soon()

    def live_sequences(self) -> int:
        return len(self.table.live)

    def stop(self) -> None:
        """Refuses new sequences; live ones may go on (E1.17)."""
        self._stopping = True

    def close(self) -> None:
        """The model is unloaded: sequences that are still live end with the reason "unloaded"."""
        self.table.close(monotonic_ns())
        self._act()
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ looking

    def sequences(self, now_ns: int) -> list[SequenceRow]:
        """Every sequence that holds a slot or waits for one, oldest first."""
        rows = []
        for sequence in sorted(self.table.holders(), key=lambda s: s.created_ns):
            in_slot = sequence.slot >= 0
            state = "slot" if in_slot else "backlog"
            if sequence.state == transitions.ENDING:
                state = "ending"
            rows.append(
                SequenceRow(
                    id=sequence.id,
                    owner=sequence.owner,
                    state=state,
                    instance=getattr(self._instances[sequence.instance], "name", "") if in_slot else "",
                    slot=sequence.slot,
                    age_us=(now_ns - sequence.created_ns) // 1000,
                    idle_us=(now_ns - sequence.last_ns) // 1000,
                    queued=len(sequence.waiting or ()),
                    executing=int(sequence.in_flight is not None),
                )
            )
        return rows

    def statistics(self) -> SequenceStatistics:
        table = self.table.statistics()
        return SequenceStatistics(
            queued=table.waiting + table.backlog_requests,
            executing=self._pool.executing,
            table=table,
            null_requests=self.null_requests,
            sequences=table.live,
            null_requests_open=self.null_requests_open,
        )


def _key(request: InferRequest) -> Key:
    """What the request's sequence is found by in the slot table."""
    owner = request.owner
    return request.sequence_id if owner is None else (owner.name, request.sequence_id)
