"""The way between the engine and a front end: what crosses, whose memory it is, and what happens without room."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neptrio.errors import InvalidArgument, Overloaded
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.observe.trace_sampler import Sampler
from neptrio.request.infer_request import (
    DataType,
    InferRequest,
    InferResponse,
    MemoryKind,
    RequestedOutput,
    Tensor,
    tensor_at,
)
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support.fronts import FrontPair

SMALL = np.arange(3, dtype=np.int32)
LARGE = np.arange(20_000, dtype=np.int32)  # more than is copied at once
TEXT = np.array([b"one", b"", b"three"], object)


@pytest.fixture
def pair() -> FrontPair:
    return FrontPair()


@pytest.mark.parametrize("array", [SMALL, LARGE, SMALL[:0]], ids=["small", "large", "empty"])
def test_a_request_and_its_answer(pair: FrontPair, array: np.ndarray) -> None:
    pair.request(
        from_numpy("IN", array),
        from_numpy("TEXT", TEXT),
        id="a",
        parameters={"x": 1, "y": "é", "z": True},
        sequence_id="s",
        sequence_start=True,
        priority=3,
        timeout_us=7,
    )
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    assert (request.id, request.sequence_id, request.sequence_start, request.sequence_end) == (
        "a",
        "s",
        True,
        False,
    )
    assert (request.priority, request.timeout_us) == (3, 7)
    assert request.parameters == {"x": 1, "y": "é", "z": True}
    np.testing.assert_array_equal(to_numpy(request.inputs[0]), array)
    assert to_numpy(request.inputs[1]).tolist() == TEXT.tolist()
    del request
    pair.directory.scheduler.answer()
    pair.turn()
    ((response, final),) = pair.answers.got
    assert final
    assert (response.model_name, response.model_version, response.id) == ("echo", "1", "a")
    assert response.outputs is not None
    np.testing.assert_array_equal(to_numpy(response.outputs[0]), array)
    assert to_numpy(response.outputs[1]).tolist() == TEXT.tolist()
    assert pair.front.under_way == pair.engine.under_way == 0


@pytest.mark.slow
def test_memory_comes_back_when_nobody_looks_at_it(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", LARGE))
    pair.turn()
    pair.directory.scheduler.answer()
    pair.turn()
    assert pair.engine.statistics()["lent"] == 1, "the front end looks at the answer where it lies"
    pair.answers.got.clear()
    gc.collect()
    pair.turn()
    for end in (pair.engine, pair.front):
        found = end.statistics()
        assert (found["used"], found["lent"], found["small"], found["waiting"]) == (0, 0, 0, 0)


def test_what_admission_refuses_is_answered(pair: FrontPair) -> None:
    pair.request(model="nope", id="a")
    pair.turn()
    ((response, final),) = pair.answers.got
    assert final
    assert str(response.error) == "Request for unknown model: 'nope' is not found"
    assert response.error is not None
    assert response.error.code.http == 404
    assert response.id == "a"


def test_a_datatype_that_a_client_has_made_up_is_the_clients_mistake(pair: FrontPair) -> None:
    pair.request(Tensor("IN", 0, (3,), b"\0" * 12))
    pair.turn()
    ((response, _),) = pair.answers.got
    assert response.error is not None
    assert response.error.code.http == 400


def test_only_the_wanted_outputs_cross(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", SMALL), from_numpy("TEXT", TEXT), outputs=[RequestedOutput("TEXT")])
    pair.turn()
    pair.directory.scheduler.answer()
    pair.turn()
    ((response, _),) = pair.answers.got
    assert [tensor.name for tensor in response.outputs or ()] == ["TEXT"]


@pytest.mark.slow
def test_without_room_requests_wait_in_order(pair: FrontPair) -> None:
    for number in range(40):
        pair.request(from_numpy("IN", LARGE + number), id=str(number))
    assert pair.late == ["front"]
    assert pair.front.statistics()["waiting"] > 0
    found: list[tuple[str, int]] = []
    for _ in range(40):
        pair.turn()
        pair.directory.scheduler.answer()
        pair.turn()
        for response, _ in pair.answers.got:
            assert response.outputs is not None
            found.append((response.id, int(to_numpy(response.outputs[0])[0])))
        pair.answers.got.clear()
        gc.collect()
    assert found == [(str(number), number) for number in range(40)]
    assert pair.front.statistics()["waiting"] == 0


def test_what_never_fits_is_refused(pair: FrontPair) -> None:
    with pytest.raises(Overloaded, match="do not fit"):
        pair.request(from_numpy("IN", np.zeros(1 << 19, np.int32)))
    assert pair.front.under_way == 0


def test_an_answer_that_never_fits_is_an_error(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", SMALL))
    pair.turn()
    (request,) = pair.directory.scheduler.requests
    request.responder.respond(request, InferResponse([from_numpy("OUT", np.zeros(1 << 19, np.int32))]), True)
    pair.turn()
    ((response, final),) = pair.answers.got
    assert final
    assert "do not fit" in str(response.error)


@pytest.mark.parametrize("lost", ["only", "first"])
def test_a_response_that_a_transport_cannot_take_is_an_error(pair: FrontPair, lost: str) -> None:
    """Its request is answered with the error, and once; others are answered as ever."""
    raises = iter([True, False])

    def respond(request: InferRequest, response: InferResponse, final: bool) -> None:
        if request.id == "lost" and next(raises):
            raise ValueError("this transport is wrong")
        pair.answers.got.append((response, final))

    pair.answers.respond = respond  # type: ignore[method-assign]
    pair.request(from_numpy("IN", SMALL), id="lost")
    pair.request(from_numpy("IN", SMALL), id="other")
    pair.engine.drain()
    if lost == "first":
        one, _ = pair.directory.scheduler.requests
        one.model.decoupled = True
        complete(one, InferResponse([from_numpy("OUT", SMALL)]), False)
        one.model.decoupled = False
        pair.turn()
        assert pair.directory.scheduler.cancelled == [one]
    pair.directory.scheduler.answer()
    pair.turn()
    (error, final), (good, _) = pair.answers.got
    assert (str(error.error), final) == ("internal error: ValueError", True)
    assert good.id == "other" and good.error is None
    assert pair.front.under_way == 0 and not pair.violations


def test_a_response_that_is_lost_behind_a_worker_is_an_error(pair: FrontPair) -> None:
    """One output was classified by a worker, and another lies on a GPU that has failed meanwhile."""
    given: list[Any] = []
    pair.engine_host.select_later = lambda *what: given.append(what)
    wanted = RequestedOutput("OUT")
    wanted.class_count = 1
    pair.request(from_numpy("IN", LARGE), outputs=[wanted, RequestedOutput("TEXT")], id="a")
    pair.turn()
    (request,) = pair.directory.scheduler.requests
    on_gpu = tensor_at("TEXT", DataType.DT_BYTES, (1,), 4096, 4, None, MemoryKind.GPU_MEMORY)
    complete(request, InferResponse([from_numpy("OUT", LARGE), on_gpu]), True)
    ((end, *asked),) = given
    end.selected(*asked, None)
    pair.turn()
    ((response, final),) = pair.answers.got
    assert final and response.id == "a" and "GPU 0, which is not open" in str(response.error)
    assert pair.front.under_way == pair.engine.under_way == 0


def test_a_request_that_the_engine_cannot_take_is_answered(pair: FrontPair) -> None:
    """Here its refusal fails."""

    def leave(client: object) -> None:
        raise RuntimeError("this host is wrong")

    pair.engine_host.enter, pair.engine_host.leave = lambda client: None, leave
    pair.front.tells_clients = True
    pair.answers.client = "10.0.0.1"  # type: ignore[attr-defined]
    pair.request(from_numpy("IN", SMALL), model="missing")
    pair.turn()
    ((response, final),) = pair.answers.got
    assert (str(response.error), final) == ("internal error: RuntimeError", True)
    assert not pair.violations


def test_cancelling(pair: FrontPair) -> None:
    request = pair.request(from_numpy("IN", SMALL))
    pair.turn()
    pair.admission.cancel(request)
    pair.admission.cancel(request)
    pair.turn()
    assert pair.directory.scheduler.cancelled == pair.directory.scheduler.requests
    assert pair.directory.scheduler.requests[0].cancelled


def test_what_is_computed_at_once_comes_before_the_cancellation(
    pair: FrontPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may close its sending side behind a request and read on: the engine finds both together."""
    scheduler = pair.directory.scheduler
    keep = scheduler.enqueue

    class AtOnce:
        def dispatch(self, now_ns: int) -> None:
            scheduler.answer()

    def enqueue(request: InferRequest) -> None:
        keep(request)
        pair.loop_pass.mark(AtOnce())

    monkeypatch.setattr(scheduler, "enqueue", enqueue)
    request = pair.request(from_numpy("IN", SMALL))
    pair.admission.cancel(request)
    pair.turn()
    ((response, final),) = pair.answers.got
    assert final and response.error is None
    assert scheduler.cancelled == []


def test_a_front_end_that_has_ended_cancels_its_requests(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", LARGE))
    pair.turn()
    pair.engine.gone()
    (request,) = pair.directory.scheduler.requests
    assert request.cancelled
    np.testing.assert_array_equal(to_numpy(request.inputs[0]), LARGE)  # its memory is there until it is done
    pair.directory.scheduler.answer()
    assert pair.directory.ready_models()[0].inflight == 0


def test_a_client_that_is_behind_holds_the_model_back(pair: FrontPair) -> None:
    pair.answers.full = True
    pair.request(from_numpy("IN", SMALL))
    pair.turn()
    (request,) = pair.directory.scheduler.requests
    went_on: list[int] = []
    sent = waiting = 0
    while waiting < 3:  # a model sends more before it is held back
        request.responder.respond(request, InferResponse([from_numpy("OUT", LARGE)]), False)
        sent += 1
        pair.turn()
        for response, _ in pair.answers.got:
            response.outputs = None
        waiting += request.responder.wait_for_room(request, lambda sent=sent: went_on.append(sent))
    assert 3 < sent < 100
    for callback in pair.answers.callbacks:
        callback()
    pair.turn()
    assert went_on == [sent - 2, sent - 1, sent]
    assert not request.responder.wait_for_room(request, lambda: None)


def test_the_other_side_is_woken_only_where_it_sleeps(pair: FrontPair) -> None:
    pair.request(from_numpy("IN", SMALL))
    pair.request(from_numpy("IN", SMALL))
    assert pair.bells == ["engine"]
    pair.turn()
    pair.request(from_numpy("IN", SMALL))
    assert pair.bells == ["engine", "engine"]


def test_streams_end_their_sequences(pair: FrontPair) -> None:
    ended: list[str] = []

    class Scheduler:
        def disconnected(self, sequence: str) -> None:
            ended.append(sequence)

    stream = SimpleNamespace(sequences={})
    pair.request(from_numpy("IN", SMALL), sequence_id="a", sequence_start=True, stream=stream)
    pair.request(from_numpy("IN", SMALL), sequence_id="b", sequence_start=True, stream=stream)
    pair.turn()
    first, second = pair.directory.scheduler.requests
    assert first.stream is second.stream
    first.stream.sequences["a"] = Scheduler()
    while stream.sequences:
        number, scheduler = stream.sequences.popitem()
        scheduler.disconnected(number)
    pair.turn()
    assert ended == ["a"]


@pytest.mark.parametrize("kind", [0, 6, 16, 99])
def test_unknown_descriptors_are_violations(pair: FrontPair, kind: int) -> None:
    pair.shared.write(pair.layout.to_engine + 256, kind.to_bytes(4, "little") + bytes(28))
    pair.shared.write(pair.layout.to_engine, (1).to_bytes(8, "little"))
    pair.engine.drain()
    assert pair.violations == [f"a descriptor of kind {kind}"]


def test_names_that_resemble_each_other_are_told_apart(pair: FrontPair) -> None:
    # names are kept by the engine's end for the next message: it must not take one for another
    names = [
        "a",
        "ab",
        "abc",
        "",
        "é",
        "e",
        "abcdefgh",
        "abcdefghi",
        "x" * 64,
        "x" * 65,
        "abcdefgh\0",
        "\ud800",
    ]
    names += [f"m{number}" for number in range(200)]
    for name in names * 2:
        pair.request(model=name)
    pair.turn()
    found = [str(response.error) for response, _ in pair.answers.got]
    assert found == [f"Request for unknown model: '{name}' is not found" for name in names * 2]


def test_tensors_that_resemble_each_other_are_told_apart(pair: FrontPair) -> None:
    made = [
        Tensor(name, dtype, shape, b"\0" * nbytes)
        for name in ("IN", "INP", "I", "", "IN" * 40)
        for dtype in (DataType.DT_INT32, DataType.DT_UINT32, DataType.DT_INVALID)
        for shape, nbytes in (((3,), 12), ((3, 1), 12), ((4,), 12), ((), 4), ((1,) * 9, 4), ((0,), 0))
    ]
    expected = []
    for tensor in made * 2:
        direct = InferRequest()
        direct.model_name, direct.inputs = "echo", [tensor]
        direct.responder = pair.answers
        admission = Admission(pair.directory, Sampler())
        admission.find(direct, None)
        try:
            admission.submit(direct)
            expected.append("accepted")
        except InvalidArgument as error:
            expected.append(str(error))
    pair.directory.scheduler.answer()
    pair.answers.got.clear()
    for tensor in made * 2:
        pair.request(tensor)
        pair.turn()
        pair.directory.scheduler.answer()
        pair.turn()
    found = ["accepted" if not response.error else str(response.error) for response, _ in pair.answers.got]
    assert found == expected
    assert len(set(expected)) > 8 and "accepted" in expected


@pytest.mark.slow
def test_memory_of_small_messages_goes_round(pair: FrontPair) -> None:
    count = 0
    for burst in (
        1,
        31,
        33,
        700,
        2000,
        64,
    ) * 4:  # more in all than the ring and what is kept of it have places
        for number in range(burst):
            pair.request(from_numpy("IN", SMALL + number))
        pair.turn()
        pair.directory.scheduler.answer()
        pair.turn()
        for number, (response, _) in enumerate(pair.answers.got):
            assert response.outputs is not None
            np.testing.assert_array_equal(to_numpy(response.outputs[0]), SMALL + number)
        count += len(pair.answers.got)
        pair.answers.got.clear()
    assert count == 4 * (1 + 31 + 33 + 700 + 2000 + 64)
    for end in (pair.engine, pair.front):
        while end.look():
            pair.turn()
        found = end.statistics()
        assert (found["used"], found["small"], found["waiting"]) == (0, 0, 0)


def test_a_way_that_is_closed_keeps_no_memory(pair: FrontPair) -> None:
    for number in range(5000):  # more than the ring takes
        pair.request(from_numpy("IN", SMALL + number))
    assert pair.front.statistics()["waiting"] > 0
    pair.front.close()
    assert pair.front.statistics()["used"] == 0


def test_who_looks_is_not_rung_for(pair: FrontPair) -> None:
    """The engine looks for requests before it sleeps: the front end rings when it sleeps, and not before."""
    assert not pair.engine.comes(1000)
    pair.request(from_numpy("IN", SMALL))
    assert pair.bells == ["engine"], "nothing came, so it sleeps"
    assert pair.engine.comes(1000)
    pair.request(from_numpy("IN", SMALL))
    assert pair.bells == ["engine"], "it is awake"
    pair.engine.drain()
    assert len(pair.directory.scheduler.requests) == 2
    pair.request(from_numpy("IN", SMALL))
    assert pair.bells == ["engine", "engine"], "it sleeps again"
    pair.engine.drain()
    pair.directory.scheduler.answer()
    assert pair.front.comes(0)
    pair.turn()
    assert len(pair.answers.got) == 3
