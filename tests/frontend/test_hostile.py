"""A front end may write anything into the shared memory: the engine gives it up, and nothing else happens.

Each round is a new pair of ends. The front end sends some correct requests, then it scribbles: over its ring, over its
messages, over everything. What the engine takes for a request is read to its last byte.
"""

from __future__ import annotations

import gc
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from neptrio.loop.loop_pass import LoopPass
from neptrio.observe.trace_options import TraceOptions
from neptrio.observe.tracer import Tracer
from neptrio.request.infer_request import RequestedOutput, Tensor, Timestamp, monotonic_ns
from neptrio.request.numpy_tensor import from_numpy
from tests.support.fronts import FrontPair

PARTS = 4
ROUNDS = int(os.environ.get("NEPTRIO_FUZZ_EXAMPLES", "2000"))
AREA = 1 << 17
RECEIVED = 2  # cext/frontend/kinds
LARGE = np.arange(5000, dtype=np.int32)
TEXT = np.array([b"one", b"", b"three"], object)
MANY = np.array([b"x" * 300] * 60, object)  # more than is copied at once
RECEIVE = Timestamp.RECV_START, Timestamp.RECV_END
EDGES = [0, 1, 2, 13, 14, 15, 64, 65, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def numbers(pair: FrontPair, array: np.ndarray, chance: random.Random) -> Tensor:
    """A tensor to be copied, or one that lies where bodies are received."""
    memory: Any = pair.front.body_memory(array.nbytes) if chance.random() < 0.5 else None
    if memory is None:
        return from_numpy("IN", array)
    place = np.frombuffer(memory, array.dtype)
    place[:] = array
    return from_numpy("IN", place)


def requests(pair: FrontPair, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 4)):
        array = LARGE if chance.random() < 0.5 else LARGE[:4]
        text = MANY if chance.random() < 0.3 else TEXT
        pair.request(
            numbers(pair, array, chance),
            from_numpy("TEXT", text),
            id="an id",
            parameters={"a": 1},
            outputs=[RequestedOutput("OUT")] if chance.random() < 0.3 else None,
            sequence_id=chance.choice([0, 7, "seven"]),
            sequence_start=True,
        )


def scribble(pair: FrontPair, chance: random.Random) -> None:
    """Writes something into what the front end can write to: everything."""
    layout = pair.layout
    how = chance.randrange(6)
    tail = struct.unpack("<Q", pair.shared.read(layout.to_engine, 8))[0]
    newest = layout.to_engine + 256 + max(tail - 1, 0) % 4096 * 32
    value = struct.pack("<Q", chance.choice(EDGES))
    if how == 0:  # a descriptor
        pair.shared.write(newest + chance.choice([0, 4, 8, 16, 24]), value[: chance.choice([4, 8])])
    elif how == 1:  # an index
        base = chance.choice([layout.to_engine, layout.to_engine + 64, layout.to_front + 64])
        pair.shared.write(base, value)
    elif how == 2:  # a number in a message
        at = layout.front_area + chance.randrange(0, 2048, 4)
        pair.shared.write(at, value[: chance.choice([1, 4, 8])])
    elif how == 3:  # any byte of a message
        at = layout.front_area + chance.randrange(0, 60_000)
        pair.shared.write(at, bytes([chance.randrange(256)]))
    elif how == 4:  # where a tensor was received
        at = pair.shared.read(layout.front_area, 1024).find(struct.pack("<IQ", RECEIVED, layout.bodies))
        if at >= 0:
            edge = layout.bodies + chance.choice([0, 8, 16, AREA - 16, AREA, -16])
            pair.shared.write(layout.front_area + at + 4, chance.choice([value, struct.pack("<Q", edge)]))
            if chance.random() < 0.5:
                size = struct.pack("<Q", chance.choice([*EDGES, AREA - 16, AREA, AREA + 1]))
                pair.shared.write(layout.front_area + at + 12, size)
    else:  # one more descriptor
        entry = struct.pack(
            "<IIQQQ",
            chance.choice([1, 2, 3, 4, 5, 16, 24, 99]),
            chance.choice([0, 16, 64, 4096, 2**31]),
            chance.choice([*EDGES, 1, 2]),
            layout.front_area + chance.choice([0, 256, 1024, AREA - 8, AREA, 2**40]),
            chance.choice([0, 64, 5000, 60_000, AREA, 2**63]),
        )
        pair.shared.write(layout.to_engine + 256 + tail % 4096 * 32, entry)
        pair.shared.write(layout.to_engine, struct.pack("<Q", (tail + 1) % 2**64))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_it_writes(part: int) -> None:
    chance = random.Random(part)
    violations = believed = 0
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(ROUNDS // PARTS):
        pair = FrontPair(AREA)
        requests(pair, chance)
        for _ in range(chance.randrange(1, 4)):
            scribble(pair, chance)
        while pair.engine.drain():
            pass
        pair.engine.look()
        for request in pair.directory.scheduler.requests:
            believed += 1
            for tensor in request.inputs:
                bytes(tensor)
        pair.directory.scheduler.answer()
        pair.engine.drain()
        assert len(pair.violations) <= 1
        violations += len(pair.violations)
        pair.engine.gone()
        pair.directory.scheduler.answer()
        assert pair.directory.ready_models()[0].inflight == 0
        pair.directory.scheduler.cancelled.clear()  # which would keep the memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 20, "memory is left behind"
    assert violations
    assert believed


def take(pair: FrontPair) -> None:
    pair.engine.drain()


def answer(pair: FrontPair) -> None:
    pair.directory.scheduler.answer()


def look(pair: FrontPair) -> None:
    pair.engine.look()


# what is touched, and the index that is written: of the ring to the engine or to the front end, its tail or its head
TOUCHED = {
    "a drain": (take, "to_engine", 0),
    "an answer": (answer, "to_front", 64),
    "a look": (look, "to_front", 64),
}


@pytest.mark.parametrize("what", TOUCHED)
def test_an_index_that_cannot_be(what: str) -> None:
    """It is noticed wherever the ring is touched next, said once, and raised out of nothing that the engine calls."""
    touch, ring, line = TOUCHED[what]
    pair = FrontPair(AREA)
    pair.request(from_numpy("IN", LARGE[:4]))
    pair.turn()
    pair.directory.scheduler.answer()  # its memory is looked after by look()
    pair.request(from_numpy("IN", LARGE))  # lent, so its end is told
    pair.engine.drain()
    assert len(pair.directory.scheduler.requests) == 1
    pair.shared.write(getattr(pair.layout, ring) + line, struct.pack("<Q", 2**63))
    touch(pair)
    assert pair.violations == ["its index of a ring cannot be"]
    pair.engine.look()
    pair.engine.drain()
    pair.directory.scheduler.answer()
    pair.engine.gone()
    assert len(pair.violations) == 1
    assert pair.directory.ready_models()[0].inflight == 0


@pytest.mark.parametrize("began", EDGES)
@pytest.mark.parametrize("whole", EDGES)
def test_when_a_request_came(tmp_path: Path, began: int, whole: int) -> None:
    """It is believed within what can be: from when there was a front end until now, and the beginning first."""
    made: list[Tracer] = []

    def tracer(loop_pass: LoopPass) -> Tracer:
        options = TraceOptions(file=str(tmp_path / "traces"), level=("TIMESTAMPS",), rate="1")
        made.append(Tracer(options, loop_pass, None))
        return made[0]

    pair = FrontPair(AREA, tracer)
    request = pair.request()
    told = struct.pack("<QQ", *(request.timestamp(int(each)) for each in RECEIVE))
    at = pair.shared.read(pair.layout.front_area, 1024).find(told)
    assert at >= 0
    pair.shared.write(pair.layout.front_area + at, struct.pack("<QQ", began, whole))
    pair.engine.drain()
    (taken,) = pair.directory.scheduler.requests
    start, end = (taken.timestamp(int(each)) for each in RECEIVE)
    if began:
        assert pair.engine.begun <= start <= end <= monotonic_ns()
    else:
        assert start == end == 0
    pair.engine.gone()
    pair.directory.scheduler.answer()
    pair.loop_pass.end()
    assert not made[0].open
    trio.run(made[0].close)
