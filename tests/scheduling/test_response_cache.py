"""The response cache: keys, LRU by bytes, exact accounting, and coalescing."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from neptrio.errors import Cancelled, TritonError, Unavailable
from neptrio.execution.batch import accept, complete
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Responder,
)
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.request.reshape import Reshape, output_reshaper
from neptrio.scheduling.base import Scheduler, SchedulerStatistics
from neptrio.scheduling.caching import COMPUTE_START, QUEUE_START, CachingScheduler
from neptrio.scheduling.response_cache import (
    ENTRY_OVERHEAD_BYTES,
    TENSOR_OVERHEAD_BYTES,
    ResponseCache,
    request_key,
)
from tests.support.batching import Timers


def tensors(*values: int, size: int = 4) -> list[Any]:
    return [from_numpy(f"T{i}", np.full(size, v, dtype=np.int32)) for i, v in enumerate(values)]


def request(*values: int) -> InferRequest:
    made = InferRequest()
    made.model_name = "m"
    made.inputs = tensors(*values)
    return made


def test_the_key_is_model_version_and_inputs() -> None:
    key = request_key(request(1, 2), "m", "1")
    same = request(1, 2)
    same.id, same.parameters = "other", {"a": 1}
    same.inputs.reverse()
    assert request_key(same, "m", "1") == key
    assert len({key, *(request_key(request(1, 2), *nv) for nv in (("m", "2"), ("n", "1"), ("m:", "1")))}) == 4
    other_shape = request(1, 2)
    other_shape.inputs[0] = other_shape.inputs[0].reshaped((2, 2))
    assert request_key(other_shape, "m", "1") != key


def test_bytes_are_counted_exactly_and_the_oldest_goes() -> None:
    one = ENTRY_OVERHEAD_BYTES + TENSOR_OVERHEAD_BYTES + 16
    cache = ResponseCache(3 * one)
    for i in range(3):
        assert cache.insert(b"%d" % i, tensors(i))
    assert cache.statistics().used_bytes == 3 * one
    assert cache.lookup(b"0", frozenset({"T0"})) is not None
    assert cache.insert(b"3", tensors(3))
    assert cache.lookup(b"1", frozenset()) is None, "1 was the least recently used"
    assert cache.lookup(b"0", frozenset()) is not None
    stats = cache.statistics()
    assert (stats.entries, stats.used_bytes, stats.evictions) == (3, 3 * one, 1)
    assert (stats.lookups, stats.hits, stats.misses) == (3, 2, 1)
    assert not cache.insert(b"big", tensors(1, size=10_000)), "larger than the cache"
    assert cache.statistics().entries == 3


def test_an_entry_without_a_wanted_output_is_a_miss() -> None:
    cache = ResponseCache(10_000)
    cache.insert(b"k", tensors(1))
    assert cache.lookup(b"k", frozenset({"T0", "T1"})) is None
    assert cache.insert(b"k", tensors(1, 2))
    assert cache.lookup(b"k", frozenset({"T0", "T1"})) is not None
    assert not cache.insert(b"k", tensors(1))


class Inner(Scheduler):
    """A scheduler that holds requests until the test answers them."""

    def __init__(self) -> None:
        self.held: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self.refuses = False
        self.most = 0  # requests that may wait
        self.timeout_ns = 0

    def enqueue(self, request: InferRequest) -> None:
        if self.refuses:
            raise TritonError("full")
        self.held.append(request)

    def has_place(self, level: int, beside: int) -> bool:
        return not self.most or beside < self.most

    def full(self, request: InferRequest) -> Unavailable:
        return Unavailable("full")

    def refused_at(self, request: InferRequest) -> int:
        return request.timestamp(QUEUE_START) + self.timeout_ns if self.timeout_ns else 0

    def cancel(self, request: InferRequest) -> None:
        self.cancelled.append(request)

    def dispatch(self, now_ns: int) -> None:
        pass

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(len(self.held), 0)


class Sink(Responder):
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if response.error is not None:
            self.values.append(str(response.error))
        else:
            self.shapes += [t.shape for t in response.outputs]
            self.values.append({t.name: int(to_numpy(t).flat[0]) for t in response.outputs})


class Client:
    """Sends requests to a cached model."""

    core: Any
    scheduler: Any

    def send(self, *values: int, outputs: list[str] | None = None) -> tuple[InferRequest, Sink]:
        made, sink = request(*values), Sink()
        made.model, made.responder = self.core, sink
        if outputs is not None:
            made.outputs = [RequestedOutput(name) for name in outputs]
        accept(made)
        self.scheduler.enqueue(made)
        return made, sink


class World(Client):
    def __init__(self, coalesce: bool = False) -> None:
        self.core = ModelCore("m", "1")
        self.core.output_names = {"T0", "T1"}
        self.core.counters = ModelCounters()
        self.inner = Inner()
        self.cache = ResponseCache(100_000, coalesce)
        self.timers = Timers()
        self.core.scheduler = self.scheduler = CachingScheduler(
            self.core, self.inner, self.cache, cast("Any", self.timers)
        )

    def count(self, name: str) -> int:
        return int(self.core.counters.snapshot()["inference_stats"][name]["count"])


def test_miss_then_hit_with_the_requested_outputs_only() -> None:
    world = World()
    first, sink = world.send(1)
    complete(first, InferResponse(tensors(10, 20)), True)
    _, again = world.send(1)
    _, part = world.send(1, outputs=["T1"])
    assert sink.values == again.values == [{"T0": 10, "T1": 20}]
    assert part.values == [{"T1": 20}]
    assert len(world.inner.held) == 1
    names = ("success", "queue", "compute_infer", "cache_hit", "cache_miss")
    assert [world.count(n) for n in names] == [3, 3, 1, 2, 1]


def test_hits_and_followers_have_clients_shapes() -> None:
    """An output is reshaped once, when the model has answered."""
    world = World(coalesce=True)
    world.core.output_names = {"T0"}
    world.core.reshape_outputs = output_reshaper({"T0": Reshape([1, -1, -1], [-1, -1, 1], False)})
    first, sink = world.send(1)
    _, follower = world.send(1)
    made = from_numpy("T0", np.zeros((1, 1, 5), np.int32))
    complete(first, InferResponse([made]), True)
    _, hit = world.send(1)
    assert sink.shapes == follower.shapes == hit.shapes == [(1, 5, 1)]


def test_errors_are_not_cached() -> None:
    world = World()
    first, sink = world.send(1)
    complete(first, InferResponse(None, TritonError("bad")), True)
    world.send(1)
    assert sink.values == ["bad"] and len(world.inner.held) == 2
    assert world.count("cache_miss") == 1, "the cache was asked and had nothing"


def test_coalesced_requests_share_one_execution() -> None:
    world = World(coalesce=True)
    first, a = world.send(1)
    _, b = world.send(1)
    gone, c = world.send(1)
    world.scheduler.cancel(gone)
    assert len(world.inner.held) == 1 and c.values == ["request cancelled"]
    assert world.scheduler.statistics().queued == 2
    complete(first, InferResponse(tensors(10, 20)), True)
    assert a.values == b.values == [{"T0": 10, "T1": 20}]
    assert world.core.inflight == 0


class Cancels(Sink):
    """Cancels another request when it is answered."""

    def __init__(self, world: World, other: InferRequest) -> None:
        super().__init__()
        self.world, self.other = world, other

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        super().respond(request, response, final)
        self.other.cancelled = True
        self.world.scheduler.cancel(self.other)


@pytest.mark.parametrize("failed", [False, True], ids=["answered", "refused"])
def test_a_follower_that_is_cancelled_while_another_is_answered_is_answered_once(failed: bool) -> None:
    world = World(coalesce=True)
    first, _ = world.send(1)
    second, _ = world.send(1)
    third, c = world.send(1)
    second.responder = Cancels(world, third)
    world.inner.refuses = failed
    complete(
        first,
        InferResponse(None if failed else tensors(10, 20), TritonError("bad") if failed else None),
        True,
    )
    assert c.values == ["request cancelled"]
    assert world.inner.held == [first]
    assert world.core.inflight == 0
    assert world.scheduler.statistics().queued == len(world.inner.held)


def test_followers_count_as_waiting() -> None:
    world = World(coalesce=True)
    world.inner.most = 2
    first, _ = world.send(1)
    followers = [world.send(1) for _ in range(2)]
    with pytest.raises(TritonError, match="full"):
        world.send(1)
    world.core.inflight -= 1  # what admission takes back for a refused one
    world.scheduler.cancel(followers[0][0])
    world.send(1)
    with pytest.raises(TritonError, match="full"):
        world.send(1)
    complete(first, InferResponse(tensors(10, 20)), True)
    assert followers[1][1].values == [{"T0": 10, "T1": 20}]
    assert world.scheduler.statistics().queued == len(world.inner.held)


def test_a_follower_is_a_miss_once_it_has_been_executed() -> None:
    """Not where no instance could begin it, since it comes again, nor where it leaves the queue."""
    world = World(coalesce=True)
    first, _ = world.send(1)
    second, b = world.send(1)
    third, c = world.send(1)
    gone, _ = world.send(1)
    complete(first, InferResponse(None, TritonError("bad")), True)
    assert world.inner.held == [first, second, third, gone] and world.count("cache_miss") == 1
    complete(gone, InferResponse(None, Cancelled()), True)
    assert world.scheduler.give_back(second) == [second]
    world.scheduler.enqueue(second)
    complete(second, InferResponse(tensors(10, 20)), True)
    third.stamp(COMPUTE_START)
    complete(third, InferResponse(tensors(30, 40)), True)
    assert (b.values, c.values) == ([{"T0": 10, "T1": 20}], [{"T0": 30, "T1": 40}])
    assert world.count("cache_miss") == 3 and world.core.inflight == 0
    assert world.send(1)[1].values == [{"T0": 10, "T1": 20}], "the answer that was stored"


@pytest.mark.parametrize("failed", [False, True], ids=["answered", "failed"])
def test_one_that_is_answered_while_a_place_is_looked_for_has_no_followers(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """By an instance that executes on the loop."""
    world = World(coalesce=True)
    first, _ = world.send(1)
    second, b = world.send(1)
    world.inner.most = 1

    def executes(now_ns: int) -> bool:
        outputs, error = (None, TritonError("bad")) if failed else (tensors(10, 20), None)
        complete(first, InferResponse(outputs, error), True)
        return True

    monkeypatch.setattr(world.inner, "catch_up", executes)
    third, c = world.send(1)
    if failed:
        assert world.inner.held == [first, second, third]
    else:
        assert b.values == c.values == [{"T0": 10, "T1": 20}] and world.inner.held == [first]
        assert world.count("cache_miss") == 1


@pytest.mark.parametrize("where", ["storing", "before"])
def test_followers_do_not_wait_for_an_answer_that_could_not_be_stored(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No memory for a copy, or an error before the answer comes to the cache: the ones that follow are answered."""

    def no_memory(*_: object) -> bool:
        raise MemoryError

    world = World(coalesce=True)
    first, a = world.send(1)
    second, b = world.send(1)
    if where == "storing":
        monkeypatch.setattr(world.scheduler.cache, "insert", no_memory)
        complete(first, InferResponse(tensors(10, 20)), True)
        assert a.values == b.values == [{"T0": 10, "T1": 20}]
    else:
        world.core.reshape_outputs = no_memory
        complete(first, InferResponse(tensors(10, 20)), True)
        assert "could not be made" in a.values[0]
        world.core.reshape_outputs = None
        assert world.inner.held == [first, second], "it is executed by itself"
        complete(second, InferResponse(tensors(1, 2)), True)
        assert b.values == [{"T0": 1, "T1": 2}]
    assert world.core.inflight == 0
