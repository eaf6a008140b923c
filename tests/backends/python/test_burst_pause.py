"""When the loop rests behind a portion of a burst of large responses, how it goes on, and that the end of a process does not rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.backends.python.burst_pause import ENOUGH_PROCESSORS, OTHERS_NS, REST_NS, BurstPause
from neptrio.backends.python.life import Life
from neptrio.backends.python.ring_server import PORTION_BYTES
from neptrio.rings import child as ring_child
from tests.support.rings import Back, Pair

MS = 1_000_000


def test_who_is_alone_does_not_rest() -> None:
    pause = BurstPause(2)
    assert [pause.after_portion(now * MS, 1) for now in range(1, 100)] == [0] * 99


def test_who_is_beside_others_rests_until_these_are_gone() -> None:
    pause = BurstPause(2)
    begun = 100 * MS
    assert pause.after_portion(begun, 1) == 0
    assert pause.after_portion(begun + MS, 3) == REST_NS
    last = begun + MS + OTHERS_NS - 1
    assert [pause.after_portion(now, 3) for now in range(begun + 2 * MS, last, MS)] == [REST_NS] * 19
    assert pause.after_portion(last, 3) == REST_NS
    assert pause.after_portion(last + 1, 3) == 0
    assert pause.after_portion(last + MS, 4) == REST_NS


def test_others_of_long_ago_do_not_count() -> None:
    """What rang between two bursts is no longer served."""
    pause = BurstPause(2)
    assert pause.after_portion(0, 1) == 0
    assert pause.after_portion(OTHERS_NS, 500) == 0
    assert pause.after_portion(2 * OTHERS_NS - 1, 501) == REST_NS


def test_nobody_rests_where_there_is_a_processor_for_others() -> None:
    for processors, rest in ((1, REST_NS), (ENOUGH_PROCESSORS - 1, REST_NS), (ENOUGH_PROCESSORS, 0), (64, 0)):
        pause = BurstPause(processors)
        assert [pause.after_portion(now * MS, now) for now in range(1, 20)] == [0] + [rest] * 18


class Server:
    """A Life whose bursts rest behind each portion, its services, and the model's end of its rings."""

    def __init__(self) -> None:
        self.pair = Pair(decoupled=True)  # for its requests and answers only
        self.timers: list[Callable[[], None]] = []
        self.rung: list[int] = []
        services = SimpleNamespace(
            completions=SimpleNamespace(post=lambda item: item.deliver()),
            doorbells=SimpleNamespace(
                turns=0, ring=self.ring, unregister=lambda bell: None, register=lambda *_: None
            ),
            timers=SimpleNamespace(at=lambda when, callback: self.timers.append(callback)),
        )
        process: Any = SimpleNamespace()
        self.life = Life(SimpleNamespace(name="m_0"), process, services, True)  # type: ignore[arg-type]
        self.life.register()
        self.life._burst_pause = SimpleNamespace(after_portion=lambda now, turns: 1)  # type: ignore[assignment]
        layout = vars(self.life.layout)
        memory = os.dup(self.life.memory)
        self.child = ring_child.ChildEnd(
            memory, self.life.bell, layout, self, Back, "m", 1, ["OUT"], False, 0
        )
        self.pair.server = self.life.end
        self.pair.begin(self.pair.request(IN=np.zeros(1, np.float32)))
        _, number, message, _ = self.child.take()
        self.ids = [request._channel.id for request in self.child.requests(number, message)]

    def catch_up(self) -> None:
        self.child.take_returns()

    def ring(self, bell: int) -> bool:
        self.rung.append(bell)
        return self.life.end.drain()

    def send(self, count: int) -> None:
        made = utils.InferenceResponse([utils.Tensor("OUT", np.ones(1, np.float32))])
        for _ in range(count):
            self.child.respond(self.ids[0], made, None, False, PORTION_BYTES)

    @property
    def got(self) -> int:
        return len(self.pair.answers.got)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.life.end.end()
    made.child.end()
    made.life.close()


def test_a_burst_goes_on_when_it_has_rested(server: Server) -> None:
    server.send(3)
    assert not server.ring(server.life.bell) and server.got == 1
    for count in (2, 3):
        server.timers.pop()()
        assert server.got == count and server.rung[-1] == server.life.bell
    server.timers.pop()()
    assert not server.timers and server.got == 3
    server.send(1)  # the ring was put to sleep: the process rings again
    assert os.eventfd_read(server.life.bell) == 2


def test_what_comes_during_a_rest_does_not_add_another(server: Server) -> None:
    """A bell that was rung before, or one that a hostile process rings all the time."""
    server.send(10)
    for count in range(1, 6):
        assert not server.ring(server.life.bell)
        assert server.got == count and len(server.timers) == 1


def test_the_end_of_a_process_does_not_rest(server: Server) -> None:
    server.send(5)
    assert not server.ring(server.life.bell) and server.got == 1
    server.life.drain_all()
    assert server.got == 5 and len(server.timers) == 1
    server.life.end.end()
    server.life.close()
    server.timers.pop()()
    assert server.rung[-1] == -1 and server.got == 5
