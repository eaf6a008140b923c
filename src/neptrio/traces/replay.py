"""Sends recorded requests again and compares the answers with the recorded ones.

The problem: a trace of level TENSORS is production traffic with its answers, hence a regression test. But trace
files may be larger than memory, hold requests in the order in which they ended, and some requests cannot be
repeated. The choice: traces are read one by one, put back into the order of their ids within a short
window, and sent by as many tasks as were asked for.

Rules:
 1. Only clients' requests are sent; the server makes their steps and calls again.
 2. A request is sent with its recorded parameters except priority and timeout, which concern load. Requests of
    one sequence are sent one after another in their order. A sequence that was not recorded from its start is
    left out, and so are the requests after one that could not be sent.
 3. What cannot be repeated is left out and counted by reason: inputs that were cut off, that lie in GPU memory
    or whose text does not give their values; requests that were cancelled, timed out or refused.
 4. Outputs that were cut off are compared as far as they were recorded.
 5. A request that failed must fail again. One that was answered must be answered with as many responses.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import trio

from neptrio.addresses import model_in_path
from neptrio.client.client import Client, InferenceError, Result, open_client
from neptrio.client.http import HttpClient
from neptrio.codec.descriptors import message_class
from neptrio.loop import threads
from neptrio.traces.compare import Difference, compare
from neptrio.traces.reader import Trace, merged
from neptrio.traces.values import array_of, flat, shape_of
from neptrio.traces.view import outcome

T = TypeVar("T")
REORDER = 256  # by how many traces the order of ids may be wrong
NOT_SENT = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")


class Unrepeatable(Exception):
    """This request cannot be sent again; the text says why."""


@dataclass
class Expected:
    """One recorded output."""

    array: np.ndarray
    full_shape: tuple[int, ...] | None  # when only the first elements were recorded


@dataclass
class Recorded:
    """A request that can be sent again, and its recorded answer."""

    number: int
    model: str
    version: str
    request_id: str
    inputs: dict[str, np.ndarray]
    parameters: dict[str, Any]
    responses: list[dict[str, Expected]]
    error: str

    @property
    def sequence(self) -> tuple[str, Any] | None:
        """(model, id) of the sequence it belongs to, None outside of sequences."""
        number = self.parameters.get("sequence_id")
        return (self.model, number) if number else None

    def outputs(self) -> list[str]:
        """The names of the outputs to ask for."""
        return list(dict.fromkeys(name for response in self.responses for name in response))


@dataclass
class Outcome:
    """What happened to one recorded request. `skipped` says why it was not sent, `failed` what the server said."""

    number: int
    model: str
    request_id: str
    skipped: str = ""
    failed: str = ""
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0  # outputs
    in_part: int = 0  # of these, outputs that were recorded only in part

    @property
    def same(self) -> bool:
        """True when it was sent and answered as recorded."""
        return not (self.skipped or self.failed or self.differences)


def recorded(trace: Trace) -> Recorded:
    """The request of a trace and its recorded answer. Raises Unrepeatable."""
    what = outcome(trace)
    if what in ("cancelled", "timeout", "rejected"):
        raise Unrepeatable(f"it was not answered when it was recorded ({what})")
    if not trace.tensors:
        raise Unrepeatable("its tensors were not recorded (trace level TENSORS)")
    inputs: dict[str, np.ndarray] = {}
    responses: dict[int, dict[str, Expected]] = {}
    current = 0
    for (activity, tensor), response in zip(trace.tensors, trace.responses, strict=True):
        name = str(tensor.get("name", ""))
        try:
            if activity == "TENSOR_QUEUE_INPUT":
                if "truncated_from" in tensor:
                    raise ValueError(
                        f"only its first {shape_of(tensor)[0]} elements of [{tensor['truncated_from']}] were "
                        "recorded (--trace-tensor-bytes)"
                    )
                if "shape" not in tensor:
                    raise ValueError("its shape was not recorded")
                inputs.setdefault(name, array_of(tensor))
            elif activity == "TENSOR_BACKEND_OUTPUT":
                current = response or current
                if name in responses.get(current, {}):  # the file does not number its responses
                    current += 1
                full = shape_of(tensor, "truncated_from") if "truncated_from" in tensor else None
                array = flat(tensor) if full else array_of(tensor)
                responses.setdefault(current, {})[name] = Expected(array, full)
        except (ValueError, IndexError) as error:
            side = "input" if activity == "TENSOR_QUEUE_INPUT" else "output"
            raise Unrepeatable(f"{side} '{name}': {error}") from None
    return Recorded(trace.id, trace.model, str(trace.version), trace.request_id, inputs, trace.parameters,
                    list(responses.values()), trace.error)  # fmt: skip


def in_order(source: IO[str], warn: Callable[[str], None], models: frozenset[str]) -> Iterator[Trace]:
    """The clients' requests of a file in the order of their ids; only those of `models` unless it is empty."""
    waiting: list[tuple[int, int, Trace]] = []  # the second, because an id may come twice
    for number, trace in enumerate(merged(source, warn, REORDER, 1 << 62)):
        if trace.parent or (models and trace.model not in models):
            continue
        heapq.heappush(waiting, (trace.id, number, trace))
        if len(waiting) > REORDER:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


# ------------------------------------------------------------ the server


class Target(Protocol):
    """A server to send requests to. Raises InferenceError, ConnectionLost."""

    async def decoupled(self, model: str) -> bool:
        """Whether the model may answer with any number of responses."""

    async def infer(self, request: Recorded, version: str, decoupled: bool) -> list[Result]:
        """Sends a request and returns its responses. Raises Unrepeatable when this protocol cannot carry it."""


def _options(request: Recorded, version: str) -> dict[str, Any]:
    parameters = {key: value for key, value in request.parameters.items() if key not in NOT_SENT}
    if request.sequence:
        parameters.update({key: request.parameters[key] for key in NOT_SENT[2:] if key in request.parameters})
    return {"version": version, "id": request.request_id, "outputs": request.outputs(), "parameters": parameters}  # fmt: skip


class GrpcTarget:
    """A server over gRPC, one channel; a request to a decoupled model takes a stream of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def decoupled(self, model: str) -> bool:
        request = message_class("inference.ModelConfigRequest")(name=model)
        raw = await self._client.unary("ModelConfig", request.SerializeToString())
        answer = message_class("inference.ModelConfigResponse").FromString(raw)
        return bool(answer.config.model_transaction_policy.decoupled)

    async def infer(self, request: Recorded, version: str, decoupled: bool) -> list[Result]:
        options = _options(request, version)
        if not decoupled:
            return [await self._client.infer(request.model, request.inputs, **options)]
        options["parameters"]["triton_enable_empty_final_response"] = True
        found: list[Result] = []
        async with self._client.stream() as stream:
            await stream.send(request.model, request.inputs, **options)
            await stream.finish()
            while (result := await stream.receive()) is not None:
                if result.outputs or not result.parameters.get("triton_final_response"):
                    found.append(result)
        return found


class HttpTarget:
    """A server over HTTP, a connection per thread."""

    def __init__(self, client: HttpClient, limit: trio.CapacityLimiter) -> None:
        self._client = client
        self._limit = limit

    async def decoupled(self, model: str) -> bool:
        path = f"/v2/models/{model_in_path(model)}/config"
        config = await self._in_thread(lambda: self._client.json("GET", path))
        return bool((config.get("model_transaction_policy") or {}).get("decoupled"))

    async def infer(self, request: Recorded, version: str, decoupled: bool) -> list[Result]:
        if decoupled:
            raise Unrepeatable("its model is decoupled, which HTTP cannot ask: use -i grpc")
        options = _options(request, version)
        return [await self._in_thread(lambda: self._client.infer(request.model, request.inputs, **options))]

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """The call's result. Who is interrupted does not wait for a server that does not answer."""
        return await threads.run(call, limiter=self._limit, abandon_on_cancel=True)


@asynccontextmanager
async def connected(protocol: str, url: str, concurrency: int) -> AsyncIterator[Target]:
    """Connects to a server. Raises OSError, ValueError."""
    if protocol == "grpc":
        address = url.split("://", 1)[-1].rstrip("/")
        async with open_client(address) as client:
            yield GrpcTarget(client)
        return
    http = HttpClient(url)
    try:
        target = HttpTarget(http, trio.CapacityLimiter(concurrency))
        await threads.run(lambda: http.json("GET", "/v2"), abandon_on_cancel=True)
        yield target
    finally:
        http.close()


# ------------------------------------------------------------ sending and comparing


@dataclass(frozen=True)
class Plan:
    """How to replay. `version`: "" = whichever the server chooses, "recorded" = the recorded one."""

    rtol: float = 0.0
    atol: float = 0.0
    concurrency: int = 1
    version: str = ""
    models: frozenset[str] = frozenset()


class Replay:
    """Sends requests to a target and calls `done` with the outcome of each as soon as it is known."""

    def __init__(self, target: Target, plan: Plan, done: Callable[[Outcome], None]) -> None:
        self._target = target
        self._plan = plan
        self._done = done
        self._decoupled: dict[str, bool | str] = {}  # a text says why the model could not be asked
        self._last: dict[tuple[str, Any], trio.Event] = {}  # sequence -> set when its last request has ended
        self._open: set[tuple[str, Any]] = set()  # sequences that were started and not ended
        self._broken: dict[tuple[str, Any], str] = {}

    async def run(self, source: IO[str], warn: Callable[[str], None]) -> None:
        """Replays a file. Raises OSError, and ConnectionLost when the server goes away."""
        tasks = trio.Semaphore(self._plan.concurrency)
        async with trio.open_nursery() as nursery:
            for trace in in_order(source, warn, self._plan.models):
                result = Outcome(trace.id, trace.model, trace.request_id)
                key = trace.parameters.get("sequence_id") and (trace.model, trace.parameters["sequence_id"])
                try:
                    request = recorded(trace)
                    self._check_sequence(request)
                except Unrepeatable as error:
                    result.skipped = str(error)
                    if key:
                        self._broken.setdefault(key, f"request {trace.id} of its sequence was left out")
                    self._done(result)
                    continue
                await tasks.acquire()
                before = after = None
                if request.sequence:
                    before, after = self._last.get(request.sequence), trio.Event()
                    self._last[request.sequence] = after
                nursery.start_soon(self._one, request, result, tasks, before, after)

    def _check_sequence(self, request: Recorded) -> None:
        key = request.sequence
        if key is None:
            return
        if request.parameters.get("sequence_start"):
            self._broken.pop(key, None)
        elif key in self._broken:
            raise Unrepeatable(self._broken[key])
        elif key not in self._open:
            raise Unrepeatable("its sequence was not recorded from the start")
        if request.parameters.get("sequence_end"):
            self._open.discard(key)
        else:
            self._open.add(key)

    async def _one(
        self, request: Recorded, result: Outcome, tasks: trio.Semaphore, before: Any, after: Any
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            await self._send(request, result)
        finally:
            if after is not None:
                after.set()
                if self._last.get(request.sequence) is after:  # type: ignore[arg-type]
                    del self._last[request.sequence]  # type: ignore[arg-type]
            tasks.release()
        self._done(result)

    async def _send(self, request: Recorded, result: Outcome) -> None:
        decoupled = await self._is_decoupled(request.model)
        if isinstance(decoupled, str):
            result.failed = decoupled
            return
        version = request.version if self._plan.version == "recorded" else self._plan.version
        try:
            responses = await self._target.infer(request, version, decoupled)
        except Unrepeatable as error:
            result.skipped = str(error)
        except InferenceError as error:
            if not request.error:
                result.failed = str(error)
        else:
            if not decoupled:  # Triton servers write the outputs of a cache miss twice
                del request.responses[:-1]
            if request.error:
                result.failed = f"it was answered; when it was recorded it failed: {request.error}"
            else:
                self._compare(request, responses, result)

    async def _is_decoupled(self, model: str) -> bool | str:
        if model not in self._decoupled:
            try:
                self._decoupled[model] = await self._target.decoupled(model)
            except InferenceError as error:
                self._decoupled[model] = str(error)
        return self._decoupled[model]

    def _compare(self, request: Recorded, responses: list[Result], result: Outcome) -> None:
        found = result.differences
        if len(responses) != len(request.responses):
            text = f"expected {len(request.responses)} responses, got {len(responses)}"
            found.append(Difference("", text))
        for number, (was, now) in enumerate(zip(request.responses, responses, strict=False)):
            for name, expected in was.items():
                got = now.outputs.get(name)
                if got is None:
                    found.append(Difference(name, "it is not in the answer", number))
                    continue
                result.compared += 1
                result.in_part += expected.full_shape is not None
                difference = compare(
                    name, expected.array, got, self._plan.rtol, self._plan.atol, expected.full_shape
                )
                if difference is not None:
                    found.append(replace(difference, response=number))
