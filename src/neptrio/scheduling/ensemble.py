"""The ensemble scheduler: takes each request through the graph of its model's steps, inside the server.

The problem: a step must start the moment its tensors exist, steps run in parallel where the graph allows it, and
each is batched in its own model with everybody else's requests. A decoupled step may answer any number of times,
and what follows it runs once for each response. The choice: a request's way through the graph is a walk, and a
walk holds frames. The root frame holds the request's inputs. Each response of a decoupled step opens a frame
below the one in which the step ran. The graph knows each step's level: how many decoupled steps it depends on
(these always follow one another, ensemble_graph sees to that). A step runs once in every frame of its level, and
a frame sees the tensors of those above it.

Rules:
 1. A step starts as soon as each of its tensors exists or is known to be absent, once per frame of its level.
    Absent are an optional input that the client did not send, and an output that a model left out of its
    answer. The step's own model decides whether it can do without.
 2. Only frames of the deepest level are answered, each once, in the order in which they were opened, with the
    outputs that were made: like other models, an ensemble may leave some out.
 3. Without decoupled steps the root is the deepest level: there is one answer, which is final.
 4. The first failure ends the walk: steps that still run are cancelled, and their later answers are dropped.
 5. A walk completes its request exactly once.
 6. Steps are ordinary requests: they carry the ensemble request's id, priority, remaining timeout, sequence and
    parameters, and are counted in the statistics of their own models.
 7. A tensor that is no output of the ensemble and that only models on a GPU read stays in device memory if its
    step makes it there. Everything else passes through host memory.
 8. A decoupled step's response sender waits while more than WALK_BYTES of its own responses, and of what was made of them, are
    held, or while the ensemble's own client has no room: a slow reader or a slow later step cannot make memory grow. It does
    not wait for what waits for it: the responses of earlier steps, and steps that cannot execute before it has ended,
    be it for the waits of other requests (scheduling.waits).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import neptrio.request.device_memory as device_memory
from neptrio.errors import Cancelled, Internal, TritonError
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.execution.foreign_inputs import ForeignInputs
from neptrio.observe.step_times import StepTimes
from neptrio.request.back_pressure import let_send
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    RequestedOutput,
    RequestState,
    Responder,
    Tensor,
    Timestamp,
    monotonic_ns,
)
from neptrio.scheduling.base import LoopServices, Scheduler, SchedulerStatistics
from neptrio.scheduling.ensemble_graph import Graph, Step
from neptrio.scheduling.waits import Wait

log = logging.getLogger("neptrio.ensemble")

QUEUE_START = int(Timestamp.QUEUE_START)
COMPUTE_START = int(Timestamp.COMPUTE_START)
TAKEN = int(RequestState.TAKEN)
WALK_BYTES = 4 << 20  # most bytes of decoupled steps' responses held by one walk
RESPONSE_OVERHEAD = 1024  # bytes that a response counts for in addition to its tensors


@dataclass(eq=False)
class _Frame:
    """The tensors made for one response of a decoupled step, or for the request itself; sees those of outer frames."""

    parent: _Frame | None
    level: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)  # tensors that will not be made in this frame
    started: set[int] = field(default_factory=set)
    below: list[_Frame] = field(default_factory=list)
    running: int = 0
    complete: bool = False
    size: int = 0  # bytes of the response that opened it (WALK_BYTES)
    held: int = 0  # of those of all frames below it

    def hold(self, size: int) -> None:
        """So many bytes more are in a frame directly below."""
        frame: _Frame | None = self
        while frame is not None:
            frame.held += size
            frame = frame.parent

    def let_go(self) -> None:
        """The walk has ended: ends that frames refer to each other, or their tensors would stay until the collector looks."""
        left = [self]
        while left:
            frame = left.pop()
            left += frame.below
            frame.below = []

    def find(self, name: str) -> Tensor | None:
        frame: _Frame | None = self
        while frame is not None:
            tensor = frame.tensors.get(name)
            if tensor is not None:
                return tensor
            frame = frame.parent
        return None

    def settled(self, name: str) -> bool:
        """The tensor exists, or is known to be absent."""
        frame: _Frame | None = self
        while frame is not None:
            if name in frame.tensors or name in frame.absent:
                return True
            frame = frame.parent
        return False


@dataclass(eq=False, slots=True)
class _Sender:
    """A decoupled step's response sender that waits for room."""

    go: Callable[[], None]  # to be called once it may send
    frame: _Frame  # in which its step runs
    wait: Wait | None  # what it means when it waits for other steps; None for a step that has ended
    held: bool  # it does


class _Walk(Responder):
    """One ensemble request on its way through the graph. It is the responder of its steps' requests."""

    def __init__(self, scheduler: EnsembleScheduler, request: InferRequest) -> None:
        graph = scheduler.graph
        self.scheduler = scheduler
        self.request = request
        self.finished = False
        self.outputs = graph.outputs
        if request.outputs is not None:
            asked = {o.name for o in request.outputs}
            self.outputs = tuple(name for name in graph.outputs if name in asked)
        needed = graph.needed_for(self.outputs)
        self.depth = graph.depth(needed)
        self.steps: list[list[Step]] = [
            [s for s in graph.steps if s.index in needed and graph.level[s.index] == level]
            for level in range(self.depth + 1)
        ]
        self.children: dict[InferRequest, tuple[Step, _Frame]] = {}
        self.waiting = 0  # steps held back by max_inflight_requests
        self._nested = 0  # how many calls of walk() are active: a step may answer while it is being started
        self._senders: list[_Sender] = []
        self._asked = False  # True when the client has promised to call back when it has room
        given = {t.name: t for t in request.inputs}
        self.root = _Frame(None, 0, given)
        if len(given) != len(graph.inputs):
            self.root.absent.update(graph.inputs.difference(given))
        self.answers: deque[_Frame] = deque([self.root] if self.depth == 0 else [])

    def walk(self, frame: _Frame) -> None:
        """Starts steps in and below `frame`, then sends the answers that are complete."""
        self._nested += 1
        try:
            self._run(frame)
        finally:
            self._nested -= 1
        if not self._nested and not self.finished:
            self._settle()

    def _run(self, frame: _Frame) -> None:
        """Starts every step that can start in `frame` and below it, and marks the frames that can be answered."""
        for step in self.steps[frame.level]:
            if step.index not in frame.started and all(frame.settled(n) for n in step.needs):
                frame.started.add(step.index)
                frame.running += 1
                self.scheduler.start(self, step, frame)
                if self.finished:
                    return
        for lower in list(frame.below):
            self._run(lower)
            if self.finished:
                return
        if frame.level == self.depth and all(frame.settled(name) for name in self.outputs):
            frame.complete = True

    def _settle(self) -> None:
        """Sends complete answers in order; finishes the request when nothing is left to run."""
        while self.answers and self.answers[0].complete and not self.finished:
            frame = self.answers.popleft()
            graph = self.scheduler.graph
            made = [graph.fitted(-1, name, frame.find(name)) for name in self.outputs]
            response = InferResponse([tensor for tensor in made if tensor is not None])
            last = not self.answers and not self.children and not self.waiting
            if last or (self.depth == 0 and not graph.decoupled):
                self.finish(response)
                return
            complete(self.request, response, False)
            self._drop(frame)
        if self.finished or self.children or self.waiting:
            self._let_send()
            return
        if self.answers:
            missing = [name for name in self.outputs if not self.answers[0].settled(name)]
            name = self.request.model_name
            self.fail(Internal(f"in ensemble '{name}', the steps made no tensor(s) {missing}"))
            return
        end = InferResponse()
        end.null = True
        self.finish(end)

    def _drop(self, frame: _Frame) -> None:
        """Removes frames that are answered and where nothing runs, to free their tensors."""
        while frame.parent is not None and not frame.running and not frame.below:
            if frame in frame.parent.below:
                frame.parent.below.remove(frame)
                frame.parent.hold(-frame.size)
            frame = frame.parent

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        """True when a decoupled step must wait before it sends more; then `callback` is called once it may."""
        step, frame = self.children.get(request, (None, self.root))
        wait = None if step is None else self.scheduler.graph.waits.get(step.index)
        held = frame.held > WALK_BYTES and self._begin(wait)
        if not held and not self._client_is_full():
            return False
        self._senders.append(_Sender(callback, frame, wait, held))
        return True

    def _begin(self, wait: Wait | None) -> bool:
        """Begins to wait for other steps, where that may be."""
        return wait is not None and not self.finished and self.scheduler.waits.begin(wait)

    def _holds(self, sender: _Sender) -> bool:
        """Whether the sender still has to wait for other steps, or has to by now."""
        if sender.frame.held > WALK_BYTES and not self.finished:
            sender.held = sender.held or self._begin(sender.wait)
        elif sender.held:
            assert sender.wait is not None
            self.scheduler.waits.end(sender.wait)
            sender.held = False
        return sender.held

    def _client_is_full(self) -> bool:
        if self.finished:
            return False
        if not self._asked:
            self._asked = True  # set first, because the client may call back before wait_for_room() returns
            if not self.request.responder.wait_for_room(self.request, self._client_has_room):
                self._asked = False
        return self._asked

    def _client_has_room(self) -> None:
        self._asked = False
        self._let_send()

    def _let_send(self) -> None:
        if not all(self._holds(sender) for sender in self._senders) and not self._client_is_full():
            senders, self._senders = self._senders, []  # as they are now: the client may have called back
            ready: list[Callable[[], None]] = []
            for sender in senders:
                if self._holds(sender):
                    self._senders.append(sender)
                else:
                    ready.append(sender.go)
            let_send(ready)

    def respond(self, child: InferRequest, response: InferResponse, final: bool) -> None:
        """Takes a step's response. Called by complete()."""
        known = self.children.get(child)
        if known is None or self.finished:
            return
        step, frame = known
        if final:
            del self.children[child]
            frame.running -= 1
            self.scheduler.ended(step)
            if response.error is None:
                self.scheduler.times.answered(step.index, child)
        if response.error is not None:
            self.scheduler.times.failed(step.index)
            self.fail(_within(self.request.model_name, response.error))
            return
        if not response.null:
            target = frame
            if step.decoupled:
                size = RESPONSE_OVERHEAD + sum(t.nbytes for t in response.outputs or ())
                target = _Frame(frame, frame.level + 1, size=size)
                frame.below.append(target)
                frame.hold(size)
                if target.level == self.depth:
                    self.answers.append(target)
            made = {t.name: t for t in response.outputs or ()}
            for own, tensor in step.outputs:
                if own in made:
                    target.tensors[tensor] = made[own].renamed(tensor)
                else:
                    target.absent.add(tensor)
            self.walk(target)
        else:
            if final:
                self._drop(frame)
            if not self._nested:
                self._settle()  # no tensor has come, so no step can start

    def fail(self, error: TritonError) -> None:
        """Ends the walk with an error."""
        if not self.finished:
            self.finish(InferResponse(None, error))

    def finish(self, response: InferResponse) -> None:
        """Sends the final response and cancels the steps that still run."""
        self.finished = True
        children, self.children = self.children, {}
        self.scheduler.walks.discard(self)
        complete(self.request, response, True)
        for child, (step, _frame) in children.items():
            self.scheduler.ended(step)
            self.scheduler.admission.cancel(child)
        self.root.let_go()
        self._let_send()


def _within(ensemble: str, error: TritonError) -> TritonError:
    """A step's error as the ensemble's error, with the text of a Triton server, since clients compare it."""
    made = TritonError(f"in ensemble '{ensemble}', {error}", error.code)
    made.reason = error.reason
    return made


class EnsembleScheduler(Scheduler):
    """Takes the requests of one ensemble through its graph."""

    def __init__(
        self,
        graph: Graph,
        admission: Admission,
        loop: LoopServices,
        max_inflight_requests: int = 0,
        foreign: ForeignInputs | None = None,
    ) -> None:
        self.graph = graph
        self.admission = admission
        self.times = StepTimes(step.model_name for step in graph.steps)
        self.walks: set[_Walk] = set()
        self.waits = loop.waits
        self._loop = loop
        self._foreign = foreign or ForeignInputs()
        self._limit = max_inflight_requests
        self._inflight = [0] * len(graph.steps)
        self._waiting: list[deque[tuple[_Walk, Step, _Frame]]] = [deque() for _ in graph.steps]
        self._dirty: set[int] = set()

    def enqueue(self, request: InferRequest) -> None:
        request.stamp(QUEUE_START)
        request.stamp(COMPUTE_START, request.timestamp(QUEUE_START))
        request.state = TAKEN
        request.scheduler = self
        request.composing = True
        walk = _Walk(self, request)
        request.scheduler_data = walk
        self.walks.add(walk)
        walk.walk(walk.root)

    def cancel(self, request: InferRequest) -> None:
        walk = request.scheduler_data
        if isinstance(walk, _Walk):
            walk.fail(Cancelled())

    def dispatch(self, now_ns: int) -> None:
        """Starts step requests that waited because of max_inflight_requests."""
        dirty, self._dirty = self._dirty, set()
        for index in dirty:
            waiting = self._waiting[index]
            while waiting and self._inflight[index] < self._limit:
                walk, step, frame = waiting.popleft()
                walk.waiting -= 1
                if not walk.finished:
                    self._submit(walk, step, frame)

    def start(self, walk: _Walk, step: Step, frame: _Frame) -> None:
        """Submits a step's request, or queues it while max_inflight_requests of the step are under way."""
        if self._limit and (self._inflight[step.index] >= self._limit or self._waiting[step.index]):
            walk.waiting += 1
            self._waiting[step.index].append((walk, step, frame))
        else:
            self._submit(walk, step, frame)

    def ended(self, step: Step) -> None:
        """A step request has had its final response, or was never accepted: another one may start."""
        self._inflight[step.index] -= 1
        if self._waiting[step.index]:
            self._dirty.add(step.index)
            self._loop.loop_pass.mark(self)

    def _submit(self, walk: _Walk, step: Step, frame: _Frame) -> None:
        request = walk.request
        child = InferRequest()
        child.model_name = step.model_name
        child.model_version = step.model_version
        child.id = request.id
        child.parameters = request.parameters
        child.sequence_id = request.sequence_id
        child.sequence_start = request.sequence_start
        child.sequence_end = request.sequence_end
        child.priority = request.priority
        child.parent = request
        child.owner = request.owner
        child.responder = walk
        tensors = []
        for own, name in step.inputs:
            tensor = self.graph.fitted(step.index, own, frame.find(name))
            if tensor is not None:
                tensors.append(tensor.renamed(own))
        child.inputs = tensors
        child.outputs = [RequestedOutput(own) for own, _ in step.outputs]
        if device_memory.in_use():
            self._keep_on_device(walk, step, child.outputs)
        walk.children[child] = (step, frame)
        self._inflight[step.index] += 1
        try:
            if request.timeout_us:
                spent_us = (monotonic_ns() - request.timestamp(QUEUE_START)) // 1000
                child.timeout_us = max(1, request.timeout_us - spent_us)
            self._foreign.submit(
                self.admission, child, lambda error: self._not_started(walk, step, frame, child, error)
            )
        except Exception as error:
            self._not_started(walk, step, frame, child, error)

    def _not_started(
        self, walk: _Walk, step: Step, frame: _Frame, child: InferRequest, error: Exception
    ) -> None:
        """A step's request was not accepted: that ends the walk."""
        name = walk.request.model_name
        if not isinstance(error, TritonError):
            log.error("a step of ensemble '%s' could not be started", name, exc_info=error)
            error = Internal(f"step '{step.model_name}' could not be started: {error}")
        if walk.children.pop(child, None) is not None:
            frame.running -= 1
            self.ended(step)
            self.times.failed(step.index)
            walk.fail(_within(name, error))

    def _keep_on_device(self, walk: _Walk, step: Step, outputs: list[RequestedOutput]) -> None:
        """Marks the outputs to be left in device memory: those read only by models that take it there (rule 7)."""
        for output, (_, tensor) in zip(outputs, step.outputs, strict=True):
            if tensor not in walk.outputs:
                readers = [s for steps in walk.steps for s in steps if tensor in s.needs]
                output.keep_on_device = bool(readers) and all(self._takes_device_memory(s) for s in readers)

    def _takes_device_memory(self, step: Step) -> bool:
        try:
            model = self.admission.lookup(step.model_name, step.model_version)
        except TritonError:
            return False
        return bool(getattr(model, "takes_device_memory", False))

    def steps(self) -> list[dict[str, Any]]:
        return self.times.rows()

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=0, executing=len(self.walks))
