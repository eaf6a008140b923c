"""Tensors that a front end has received into its memory for bodies: where the engine reads them, and whose they are."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest

from neptrio.request.infer_request import InferResponse, Tensor
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.rings.message import Violation
from tests.support.fronts import AREA, FrontPair

SMALL = np.arange(3, dtype=np.int32)
LARGE = np.arange(20_000, dtype=np.int32)
TEXT = np.array([b"one", b"", b"three"], object)
RECEIVED, PASSED = 2, 3  # cext/frontend/kinds
NOTHING = {"used": 0, "bodies": 0, "lent": 0, "small": 0, "waiting": 0}


@pytest.fixture
def pair() -> FrontPair:
    return FrontPair()


def memory(pair: FrontPair, size: int) -> np.ndarray:
    """Bytes of the memory for bodies, as a transport takes them."""
    taken = pair.front.body_memory(size)
    assert taken is not None
    return np.frombuffer(taken, np.uint8)  # type: ignore[call-overload]  # it is a buffer


def received(pair: FrontPair, array: np.ndarray) -> Tensor:
    """The array as a tensor that lies where a body is received."""
    place = memory(pair, array.nbytes).view(array.dtype)
    place[:] = array
    return from_numpy("IN", place)


def held(pair: FrontPair) -> dict[str, Any]:
    """What the front end holds when everything has come that was sent."""
    gc.collect()
    pair.turn()
    found = pair.front.statistics()
    return {name: found[name] for name in NOTHING}


def test_the_engine_reads_a_body_where_it_was_received(pair: FrontPair) -> None:
    place = memory(pair, LARGE.nbytes).view(np.int32)
    place[:] = LARGE
    pair.request(from_numpy("IN", place), from_numpy("TEXT", TEXT), id="a")
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    assert request.id == "a"
    found = to_numpy(request.inputs[0])
    np.testing.assert_array_equal(found, LARGE)
    assert to_numpy(request.inputs[1]).tolist() == TEXT.tolist()
    place[0] = 77
    assert found[0] == 77, "nothing was copied"


def test_other_tensors_of_a_body_are_copied(pair: FrontPair) -> None:
    """Those that do not lie at a multiple of 16 bytes, strings, and those without an element."""
    place = memory(pair, 4 * LARGE.size).view(np.int32)
    place[:] = LARGE
    text = from_numpy("TEXT", TEXT)
    strings = memory(pair, len(bytes(text)))
    strings[:] = np.frombuffer(bytes(text), np.uint8)
    inputs = [
        from_numpy("IN", place[1:5]),
        Tensor("TEXT", text.dtype, text.shape, strings),
        from_numpy("IN", place[4:4]),
        from_numpy("IN", place[8:16]),
    ]
    for tensor in inputs:
        pair.request(tensor)
    pair.engine.drain()
    place[:] = 0
    strings[:] = 255
    found = [to_numpy(request.inputs[0]).tolist() for request in pair.directory.scheduler.requests]
    assert found == [[1, 2, 3, 4], TEXT.tolist(), [], [0] * 8], "only the last is read where it lies"


@pytest.mark.slow
def test_the_memory_comes_back_when_neither_side_looks(pair: FrontPair) -> None:
    pair.request(received(pair, LARGE))
    pair.turn()
    (request,) = pair.directory.scheduler.requests
    kept = to_numpy(request.inputs[0])
    del request
    pair.directory.scheduler.answer()
    pair.turn()
    pair.answers.got.clear()
    assert pair.front.under_way == 0
    found = held(pair)
    assert (found["bodies"], found["lent"]) == (80_128, 1), "the engine looks at it"
    other = received(pair, LARGE * 2)
    np.testing.assert_array_equal(kept, LARGE)
    del kept, other
    assert held(pair) == NOTHING


@pytest.mark.slow
def test_a_client_that_leaves_takes_nothing_away(pair: FrontPair) -> None:
    """The engine may read until it has answered, which it does late."""
    request = pair.request(received(pair, LARGE))
    pair.turn()
    pair.admission.cancel(request)
    del request
    pair.turn()
    other = received(pair, LARGE * 2)
    assert pair.directory.scheduler.cancelled == pair.directory.scheduler.requests
    np.testing.assert_array_equal(to_numpy(pair.directory.scheduler.requests[0].inputs[0]), LARGE)
    del other
    pair.directory.scheduler.cancelled.clear()
    pair.directory.scheduler.answer()
    pair.turn()
    pair.answers.got.clear()
    assert held(pair) == NOTHING


@pytest.mark.slow
def test_a_body_whose_message_waits_for_room_stays(pair: FrontPair) -> None:
    """Messages with copied tensors fill the area; those that name bodies wait behind them, in order."""
    for number in range(40):
        array = LARGE + number
        pair.request(received(pair, array[:16]) if number % 2 else from_numpy("IN", array), id=str(number))
    assert pair.front.statistics()["waiting"] > 10
    found: list[tuple[str, int, int]] = []
    for _ in range(40):
        pair.turn()
        pair.directory.scheduler.answer()
        pair.turn()
        for response, _ in pair.answers.got:
            assert response.outputs is not None
            output = to_numpy(response.outputs[0])
            found.append((response.id, int(output[0]), len(output)))
            del response, output
        pair.answers.got.clear()
        gc.collect()
    assert found == [(str(n), n, 16 if n % 2 else LARGE.size) for n in range(40)]
    assert held(pair) == NOTHING


def test_bodies_fill_their_own_memory_only(pair: FrontPair) -> None:
    assert pair.front.body_memory(AREA + 1) is None
    taken = [memory(pair, AREA // 4) for _ in range(4)]
    assert pair.front.body_memory(1) is None
    pair.request(from_numpy("IN", LARGE))
    pair.turn()
    assert len(pair.directory.scheduler.requests) == 1, "messages have their room"
    taken.pop(1)
    assert len(memory(pair, AREA // 4)) == AREA // 4


@pytest.mark.slow
def test_a_request_that_could_not_be_packed_leaves_nothing_behind(pair: FrontPair) -> None:
    tensor = received(pair, LARGE)
    with pytest.raises(TypeError):
        pair.request(tensor, parameters={"a": object()})
    with pytest.raises(TypeError):
        pair.request(tensor, object())
    del tensor
    pair.request(from_numpy("IN", SMALL))
    pair.directory.scheduler.answer()
    pair.turn()
    pair.directory.scheduler.answer()
    pair.turn()
    pair.answers.got.clear()
    assert held(pair) == NOTHING


def test_a_way_that_is_closed_gives_no_memory(pair: FrontPair) -> None:
    pair.request(received(pair, LARGE))
    pair.engine.drain()
    pair.front.close()
    assert pair.front.body_memory(1) is None, "the engine may still read there"
    (request,) = pair.directory.scheduler.requests
    np.testing.assert_array_equal(to_numpy(request.inputs[0]), LARGE)


@pytest.mark.slow
def test_the_memory_of_a_front_end_that_has_ended_is_there_until_the_model_is_done() -> None:
    pair = FrontPair()
    pair.request(received(pair, LARGE))
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    kept = to_numpy(request.inputs[0])
    pair.engine.gone()
    del request, pair
    gc.collect()
    np.testing.assert_array_equal(kept, LARGE)


@pytest.mark.slow
def test_an_output_that_is_an_input_is_not_copied_back(pair: FrontPair) -> None:
    place = memory(pair, LARGE.nbytes).view(np.int32)
    place[:] = LARGE
    pair.request(from_numpy("IN", place), from_numpy("TEXT", TEXT), id="a")
    pair.turn()
    pair.directory.scheduler.answer()
    pair.turn()
    assert pair.engine.statistics()["lent"] == 0, "a short answer"
    ((response, _),) = pair.answers.got
    assert response.outputs is not None
    found, text = (to_numpy(tensor) for tensor in response.outputs)
    del response, pair.answers.got[:]
    np.testing.assert_array_equal(found, LARGE)
    assert text.tolist() == TEXT.tolist()
    place[0] = 77
    assert found[0] == 77
    del place
    assert held(pair)["bodies"] == 80_128, "until it is sent"
    other = received(pair, LARGE * 2)
    assert found[1] == 1
    del found, other
    assert held(pair) == NOTHING


def test_a_part_of_an_input_is_not_copied_back(pair: FrontPair) -> None:
    pair.request(received(pair, LARGE))
    pair.turn()
    (request,) = pair.directory.scheduler.requests
    (whole,) = request.inputs
    outputs = [
        from_numpy("OUT", to_numpy(whole)[10:100]),
        from_numpy("OUT", to_numpy(whole)[LARGE.size :]),
        from_numpy("OUT", np.full(3, 7, np.int32)),
    ]
    request.responder.respond(request, InferResponse(outputs), True)
    del outputs, whole, request
    pair.turn()
    ((response, _),) = pair.answers.got
    found = [to_numpy(tensor).tolist() for tensor in response.outputs or ()]
    assert found == [LARGE[10:100].tolist(), [], [7] * 3]


def test_an_input_of_another_request_is_copied(pair: FrontPair) -> None:
    for number in range(2):
        pair.request(received(pair, LARGE + number), id=str(number))
    pair.turn()
    first, second = pair.directory.scheduler.requests
    first.responder.respond(first, InferResponse(second.inputs), True)
    pair.turn()
    ((response, _),) = pair.answers.got
    assert response.outputs is not None
    np.testing.assert_array_equal(to_numpy(response.outputs[0]), LARGE + 1)
    assert pair.engine.statistics()["lent"] == 1


def test_what_a_scheduler_has_put_beside_the_inputs_is_copied(pair: FrontPair) -> None:
    """As a sequence's state, which may be an input of an earlier request that the front end has forgotten."""
    pair.request(received(pair, LARGE))
    pair.turn()
    (first,) = pair.directory.scheduler.requests
    state = first.inputs[0].renamed("STATE")
    del first
    pair.directory.scheduler.answer()
    pair.turn()
    pair.answers.got.clear()
    pair.request(received(pair, LARGE + 1))
    pair.turn()
    (second,) = pair.directory.scheduler.requests
    second.inputs.append(state)
    second.responder.respond(second, InferResponse(second.inputs), True)
    pair.turn()
    ((response, _),) = pair.answers.got
    found = [to_numpy(tensor) for tensor in response.outputs or ()]
    np.testing.assert_array_equal(found, [LARGE + 1, LARGE])


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-16, 16), (0, 80_001), (80_000, 1), (79_984, 17), (2**63, 16), (0, 2**64 - 1), (-(2**33), 2**64 - 16)],
)
def test_what_is_no_input_is_not_passed_back(pair: FrontPair, offset: int, nbytes: int) -> None:
    pair.request(received(pair, LARGE))
    pair.turn()
    pair.directory.scheduler.answer()
    first = pair.layout.bodies
    wrong = (PASSED, (first + offset) % 2**64, nbytes)
    told(pair, PASSED, first, LARGE.nbytes, wrong, pair.layout.engine_area)
    with pytest.raises(Violation):
        pair.front.drain()


def test_a_front_end_is_passed_nothing(pair: FrontPair) -> None:
    tensor = received(pair, LARGE)
    pair.request(tensor)
    first = pair.layout.bodies
    wrong = (PASSED, first, LARGE.nbytes)
    told(pair, RECEIVED, first, LARGE.nbytes, wrong, pair.layout.front_area)
    given_up(pair, "passed")


def given_up(pair: FrontPair, why: str) -> None:
    """The engine takes what has come for a violation, says so once, and takes nothing more."""
    pair.engine.drain()
    (said,) = pair.violations
    assert why in said
    assert not pair.directory.scheduler.requests


def told(pair: FrontPair, place: int, offset: int, nbytes: int, new: tuple[int, int, int], area: int) -> None:
    """Has the first message of an area say something else of where its tensor is."""
    text = pair.shared.read(area, 1024)
    at = text.index(struct.pack("<IQQ", place, offset, nbytes))
    pair.shared.write(area + at, struct.pack("<IQQ", *new))


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (-256, 64),
        (-16, 16),
        (AREA - 16, 17),
        (0, AREA + 1),
        (AREA, 0),
        (AREA, 16),
        (0, 2**64 - 1),
        (16, 2**64 - 16),
        (None, 16),
        (2**63, 16),
    ],
)
def test_what_lies_elsewhere_is_a_violation(pair: FrontPair, offset: int | None, nbytes: int) -> None:
    pair.request(received(pair, LARGE))
    first = pair.layout.bodies
    wrong = (RECEIVED, 0 if offset is None else (first + offset) % 2**64, nbytes)
    told(pair, RECEIVED, first, LARGE.nbytes, wrong, pair.layout.front_area)
    given_up(pair, "outside")


def test_the_last_bytes_may_be_named(pair: FrontPair) -> None:
    pair.request(received(pair, LARGE))
    first = pair.layout.bodies
    last = (RECEIVED, first + AREA - 16, 16)
    told(pair, RECEIVED, first, LARGE.nbytes, last, pair.layout.front_area)
    pair.turn()
    ((response, _),) = pair.answers.got
    assert response.error is not None and response.error.code.http == 400, "16 bytes for 20,000 elements"


def test_a_message_that_is_not_lent_names_no_bodies(pair: FrontPair) -> None:
    """Nobody would hold them: a short message is done with when it is read."""
    pair.request(received(pair, LARGE))
    pair.shared.write(pair.layout.to_engine + 256 + 24, struct.pack("<Q", 16384))
    given_up(pair, "outside")


def test_the_engine_receives_no_bodies(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", LARGE))
    pair.turn()
    pair.directory.scheduler.answer()
    wrong = (RECEIVED, pair.layout.bodies, LARGE.nbytes)
    told(pair, 0, 0, LARGE.nbytes, wrong, pair.layout.engine_area)
    with pytest.raises(Violation, match="outside"):
        pair.front.drain()


def test_only_models_without_strings_have_memory(pair: FrontPair) -> None:
    def told(version: str, latest: bool, *kinds: int) -> dict[str, Any]:
        inputs = [[f"IN{i}", kind, [-1], False, False] for i, kind in enumerate(kinds)]
        rest = {"decoupled": False, "max_batch_size": 0, "inputs": inputs}
        return {"version": version, "labels": [], "latest": latest, **rest}

    numbers, strings = 11, 13
    source = pair.admission.body_source
    assert source("a", "") is None
    models = {
        "a": [told("1", False, numbers), told("2", True, numbers, strings)],
        "b": [told("1", True, numbers)],
    }
    pair.admission.renew(models, True, False, False)
    having = [(name, version) for name in "abc" for version in ("", "1", "2") if source(name, version)]
    assert having == [("a", "1"), ("b", ""), ("b", "1")]
    give = source("b", "")
    assert give is not None
    taken = give(1 << 16)
    assert taken is not None and len(taken) == 1 << 16
    pair.admission.renew({"b": []}, False, False, False)
    assert source("b", "") is None and source("a", "1") is not None
