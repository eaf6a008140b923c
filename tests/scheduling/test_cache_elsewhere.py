"""Requests that wait for a cache elsewhere: answered once, counted as waiting, and never without an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from neptrio.config.model_config import parse_text
from neptrio.errors import TritonError
from neptrio.execution.batch import complete
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor
from neptrio.request.numpy_tensor import from_numpy
from neptrio.scheduling.base import ServedModel
from neptrio.scheduling.cache_elsewhere import QUEUE_START, AskingScheduler, CacheElsewhere
from neptrio.scheduling.response_cache import CacheStatistics
from tests.scheduling.test_response_cache import Client, Inner, Sink, tensors
from tests.support.batching import Timers

CONFIG = """
name: "m" backend: "identity"
output [ { name: "T0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "T1" data_type: TYPE_INT32 dims: [ 4 ] } ]
"""


class Asked:
    def __init__(self, key: bytes, answered: Callable[[list[Tensor] | None], None]) -> None:
        self.key, self.answered, self.wanted = key, answered, True

    def forget(self) -> None:
        self.wanted = False

    def __call__(self, *values: int) -> None:
        """Answers it: with what was found, without values with nothing."""
        assert self.wanted
        self.answered(tensors(*values) if values else None)


class Elsewhere(CacheElsewhere):
    """A cache that answers when the test does."""

    def __init__(self, coalesce: bool) -> None:
        super().__init__(coalesce)
        self.asked: list[Asked] = []
        self.stored: list[tuple[bytes, list[str]]] = []
        self.down = False
        self.hits = 0
        self.why: list[str] = []

    def begin(self) -> None: ...

    def close(self) -> None: ...

    def ask(self, key: bytes, answered: Callable[[list[Tensor] | None], None]) -> Asked | None:
        if self.down:
            return None
        self.asked.append(Asked(key, answered))
        return self.asked[-1]

    def insert(self, key: bytes, outputs: list[Tensor]) -> bool:
        self.stored.append((key, [tensor.name for tensor in outputs]))
        return False

    def used(self) -> None:
        self.hits += 1

    def refused(self, why: str) -> None:
        self.why.append(why)

    def statistics(self) -> CacheStatistics:
        raise NotImplementedError


class World(Client):
    def __init__(self, coalesce: bool = False) -> None:
        self.core = ServedModel("m", "1")
        self.core.config = parse_text(CONFIG, "config.pbtxt")
        self.core.output_names = {"T0", "T1"}
        self.core.counters = ModelCounters()
        self.inner = Inner()
        self.cache = Elsewhere(coalesce)
        self.timers = Timers()
        self.core.scheduler = self.scheduler = AskingScheduler(
            self.core, self.inner, self.cache, cast("Any", self.timers)
        )

    def count(self, *names: str) -> list[int]:
        found = self.core.counters.snapshot()["inference_stats"]
        return [int(found[name]["count"]) for name in names]

    @property
    def queued(self) -> int:
        return self.scheduler.statistics().queued


def test_a_hit_is_answered_and_nothing_is_executed() -> None:
    world = World()
    _, sink = world.send(1)
    assert sink.values == [] and world.queued == 1, "it waits"
    world.cache.asked[0](10, 20)
    assert sink.values == [{"T0": 10, "T1": 20}] and world.queued == 0
    assert world.count("success", "queue", "cache_hit", "cache_miss", "compute_infer") == [1, 1, 1, 0, 0]
    assert world.cache.hits == 1 and world.core.inflight == 0 and not world.inner.held


@pytest.mark.parametrize("down", [False, True])
def test_a_miss_is_executed_and_its_answer_stored(down: bool) -> None:
    world = World()
    world.cache.down = down
    first, sink = world.send(1, outputs=["T1"])
    if not down:
        world.cache.asked[0]()
    assert world.inner.held == [first]
    complete(first, InferResponse(tensors(10, 20)), True)
    assert sink.values == [{"T0": 10, "T1": 20}], "the responder picks"
    assert [names for _, names in world.cache.stored] == [["T1"]], "what was asked for"
    assert world.count("success", "cache_hit", "cache_miss") == [1, 0, 1] and world.core.inflight == 0


def test_the_key_has_the_outputs_that_are_asked_for() -> None:
    world = World()
    world.send(1)
    world.send(1, outputs=["T1", "T0"])
    world.send(1, outputs=["T1"])
    world.send(2)
    keys = [asked.key for asked in world.cache.asked]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (tensors(1), "outputs ['T0'] where ['T0', 'T1']"),
        (tensors(1, 2, 3), "outputs ['T0', 'T1', 'T2']"),
        ([*tensors(1), *tensors(1)], "outputs ['T0', 'T0']"),
        (tensors(1, 2, size=3), "output 'T1' of shape [3]"),
        ([*tensors(1), from_numpy("T1", np.zeros((2, 2), np.int32))], "output 'T1' of shape [2, 2]"),
        ([*tensors(1), from_numpy("T1", np.zeros(4, np.float32))], "datatype 11"),
    ],
)
def test_what_cannot_be_the_models_answer_is_a_miss(found: list[Tensor], why: str) -> None:
    world = World()
    first, sink = world.send(1)
    world.cache.asked[0].answered(found)
    assert world.inner.held == [first] and sink.values == []
    assert len(world.cache.why) == 1 and why in world.cache.why[0]
    assert world.cache.hits == 0


def test_one_that_waits_for_the_cache_can_be_cancelled() -> None:
    world = World()
    first, sink = world.send(1)
    world.scheduler.cancel(first)
    assert sink.values == ["request cancelled"]
    assert not world.cache.asked[0].wanted and world.queued == 0 and world.core.inflight == 0
    second, _ = world.send(1)
    world.cache.asked[1]()
    world.scheduler.cancel(second)
    assert world.inner.cancelled == [second], "after that it is the inner scheduler's"


def test_those_that_wait_when_the_model_stops_are_executed() -> None:
    world = World()
    first, _ = world.send(1)
    second, _ = world.send(2)
    world.scheduler.stop()
    assert world.inner.held == [first, second] and world.queued == 2
    assert not any(asked.wanted for asked in world.cache.asked)
    world.inner.refuses = True
    with pytest.raises(TritonError, match="full"):
        world.send(3)
    assert len(world.cache.asked) == 2, "after that nothing waits for the cache"


def test_they_count_as_waiting() -> None:
    world = World()
    world.inner.most = 2
    requests = [world.send(number)[0] for number in range(2)]
    with pytest.raises(TritonError, match="full"):
        world.send(5)
    world.core.inflight -= 1  # what admission takes back for a refused one
    world.scheduler.cancel(requests[0])
    world.send(6)
    assert world.queued == 2


@pytest.mark.parametrize("error", [TritonError("full"), ValueError("a defect")], ids=["refused", "defect"])
def test_a_miss_that_cannot_be_queued_is_answered_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world = World(coalesce=True)
    _, a = world.send(1)
    _, b = world.send(1)

    def refuses(_: InferRequest) -> None:
        raise error

    monkeypatch.setattr(world.inner, "enqueue", refuses)
    world.cache.asked[0]()
    assert len(a.values) == len(b.values) == 1
    assert str(error) in a.values[0] and str(error) in b.values[0]
    assert world.core.inflight == 0 and world.queued == 0


def test_requests_that_equal_one_that_is_asked_for_follow_it() -> None:
    world = World(coalesce=True)
    _, a = world.send(1)
    _, b = world.send(1)
    assert len(world.cache.asked) == 1 and world.queued == 2
    world.cache.asked[0](10, 20)
    assert a.values == b.values == [{"T0": 10, "T1": 20}]
    first, c = world.send(1)
    gone, d = world.send(1)
    _, e = world.send(1)
    world.cache.asked[1]()
    world.scheduler.cancel(gone)
    assert world.inner.held == [first]
    complete(first, InferResponse(tensors(30, 40)), True)
    assert c.values == e.values == [{"T0": 30, "T1": 40}] and d.values == ["request cancelled"]
    assert world.count("cache_hit", "cache_miss") == [3, 1] and world.core.inflight == 0


def test_followers_of_one_that_is_cancelled_go_on_alone() -> None:
    world = World(coalesce=True)
    first, _ = world.send(1)
    second, b = world.send(1)
    world.scheduler.cancel(first)
    assert world.inner.held == [second]
    complete(second, InferResponse(tensors(10, 20)), True)
    assert b.values == [{"T0": 10, "T1": 20}] and world.core.inflight == 0 and world.queued == 1


def test_the_wait_for_the_cache_ends_at_the_deadline() -> None:
    """Each at its own; those that follow one whose time is over go on alone."""
    world = World(coalesce=True)
    world.inner.timeout_ns = 1_000
    _, a = world.send(1)
    follower, b = world.send(1)
    world.inner.timeout_ns = 0
    patient, c = world.send(1)
    world.timers.fire(follower.timestamp(QUEUE_START) + 999)
    assert "timeout expired" in a.values[0] and not world.cache.asked[0].wanted
    assert world.inner.held == [follower, patient] and b.values == [], "the model's queue has them now"
    assert world.queued == 2 and world.timers.next() is None
    complete(follower, InferResponse(tensors(10, 20)), True)
    complete(patient, InferResponse(tensors(10, 20)), True)
    assert b.values == c.values == [{"T0": 10, "T1": 20}] and world.core.inflight == 0


class Sends(Sink):
    """Sends the same request again when it is answered."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.others: list[Sink] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        super().respond(request, response, final)
        if len(self.others) < 2:
            self.others.append(self.world.send(1)[1])


def test_who_is_answered_may_come_back_at_once() -> None:
    world = World(coalesce=True)
    first, _ = world.send(1)
    first.responder = sink = Sends(world)
    world.cache.asked[0](10, 20)
    assert sink.values == [{"T0": 10, "T1": 20}]
    assert [other.values for other in sink.others] == [[{"T0": 10, "T1": 20}]]
    assert world.core.inflight == 0
