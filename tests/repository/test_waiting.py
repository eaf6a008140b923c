"""Requests that wait for their model (repository.waiting): which of them is the most urgent."""

from __future__ import annotations

import random
from typing import Any

import pytest

from neptrio.observe.counters import ModelCounters
from neptrio.repository.waiting import Room, StandIn
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState, Responder
from tests.support.batching import Timers


class Nobody(Responder):
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        pass


class Looked(InferRequest):
    """Counts how often anybody asks a request for its priority."""

    times = 0

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.responder = Nobody()
        self._priority = priority

    @property
    def priority(self) -> int:  # type: ignore[override]
        Looked.times += 1
        return self._priority


@pytest.fixture
def room() -> Room:
    timers: Any = Timers()
    return Room("m", timers, ModelCounters(), 1 << 62)


@pytest.fixture
def stand_in(room: Room) -> StandIn:
    return StandIn("m", "", None, room, lambda: None)


def parked(stand_in: StandIn, priority: int) -> InferRequest:
    request = Looked(priority)
    stand_in.park(request)
    return request


def test_the_highest_priority_is_known_whoever_comes_and_leaves(room: Room, stand_in: StandIn) -> None:
    chance = random.Random(1)
    here: list[InferRequest] = []
    for step in range(1500):
        if here and chance.random() < (0.3 if step < 500 else 0.7):
            room.cancel(here.pop(chance.randrange(len(here))))
        else:
            here.append(parked(stand_in, chance.choice((0, 0, 1, 2, 3, 5, 2**64 - 1))))
        if chance.random() < 0.5:  # several may come and leave between two looks
            assert room.priority == min((r.priority for r in here if r.priority), default=0)
    assert room.release(lambda request: None, lambda version: True) == len(here)
    assert room.priority == 0 and len(room) == 0


def test_nobody_is_looked_at_while_one_with_the_highest_priority_waits(room: Room, stand_in: StandIn) -> None:
    """Loads are ranked whenever one begins or ends, for each model that requests wait for."""
    assert room.priority == 0
    plain = [parked(stand_in, 0) for _ in range(5)]
    assert room.priority == 0
    urgent = [parked(stand_in, priority) for priority in (7, 2, 2, 9)]
    room.cancel(plain[0])
    room.cancel(urgent[1])
    room.cancel(urgent[3])
    Looked.times = 0
    assert [room.priority for _ in range(3)] == [2, 2, 2]
    assert Looked.times == 0
    room.cancel(urgent[2])
    assert room.priority == 7
    Looked.times = 0
    assert [room.priority for _ in range(3)] == [7, 7, 7]
    assert Looked.times == 0


def test_a_request_that_is_parked_again_waits_no_longer() -> None:
    """As where an alias has come to name another model that is not loaded either."""
    timers: Any = Timers()
    first, other = (Room(name, timers, ModelCounters(), 10**9) for name in ("m", "other"))
    request = parked(StandIn("m", "", None, first, lambda: None), 0)
    limit = timers.next()
    assert first.release(StandIn("other", "", None, other, lambda: None).park, lambda version: True) == 1
    assert (len(first), len(other), timers.next()) == (0, 1, limit)
    request.timeout_us = 1
    assert other.release(StandIn("m", "", None, first, lambda: None).park, lambda version: True) == 1
    assert timers.next() < limit, "its own time is over before"
    assert first.release(StandIn("m", "", None, other, lambda: None).park, lambda version: False) == 0
    timers.fire(limit)
    assert request.state == RequestState.DONE and not first and not other
