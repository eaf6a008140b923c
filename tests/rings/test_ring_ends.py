"""Batches, responses and calls between the server's end of the rings and the model's."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.errors import Internal, Reason, TritonError
from neptrio.execution.batch import complete
from neptrio.request.infer_request import InferResponse, RequestedOutput
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.rings import given, model_side
from tests.support.rings import AREA, Pair, channel_of
from tests.support.waiting import until
from triton_python_backend_utils._execute import OPEN_ANSWER, RESCHEDULED_ANSWER
from triton_python_backend_utils._process import kinds
from triton_python_backend_utils._sender import UNTOLD_BYTES

BIG = 100_000  # bytes: above what is copied anyway


@pytest.fixture(params=["compiled", "plain"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(plain=request.param == "plain")
    yield made
    made.close()


def answer(*arrays: np.ndarray, **more: Any) -> Any:
    return lambda requests: [
        utils.InferenceResponse([utils.Tensor(f"OUT{i}", a) for i, a in enumerate(arrays)], **more)
        for _ in requests
    ]


def test_a_request_arrives_as_it_was_sent(pair: Pair) -> None:
    request = pair.request(A=np.arange(6, dtype=np.int32).reshape(2, 3), B=np.array([[b"x", b""]], object))
    request.id, request.sequence_id, request.timeout_us = "an id", "a sequence", 17
    request.sequence_start = request.sequence_end = True
    request.parameters = {"text": "\u00e9", "number": 2, "part": 0.5, "flag": True}
    request.outputs = [RequestedOutput("B"), RequestedOutput("A")]
    seen: list[utils.InferenceRequest] = []

    def execute(requests: list[utils.InferenceRequest]) -> Any:
        seen.extend(requests)
        np.testing.assert_array_equal(requests[0].inputs()[0].as_numpy(), [[0, 1, 2], [3, 4, 5]])
        assert requests[0].inputs()[1].as_numpy().tolist() == [[b"x", b""]]
        return answer(np.zeros(1, np.float32))(requests)

    pair.begin(request)
    pair.execute(execute)
    (got,) = seen
    assert (got.request_id(), got.correlation_id(), got.timeout(), got.flags()) == (
        "an id",
        "a sequence",
        17,
        3,
    )
    assert json.loads(got.parameters()) == {"text": "\u00e9", "number": 2, "part": 0.5, "flag": True}
    assert list(got.requested_output_names()) == ["B", "A"]
    assert [t.name() for t in got.inputs()] == ["A", "B"] and got.inputs()[0].shape() == [2, 3]
    assert (got.model_name(), got.model_version()) == ("m", 1)


@pytest.mark.parametrize("n", [0, 1, 1000, BIG])
@pytest.mark.parametrize(
    "kind", ["bool", "uint8", "int16", "float16", "float64", "int64", ml_dtypes.bfloat16]
)
def test_every_datatype_and_size_comes_back(pair: Pair, kind: Any, n: int) -> None:
    array = (np.arange(n) % 2).astype(kind)
    (tensor,) = pair.outputs(lambda requests: answer(requests[0].inputs()[0].as_numpy())(requests), IN=array)
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_errors_parameters_and_answers_of_several_requests(pair: Pair) -> None:
    requests = [pair.request(IN=np.zeros(1, np.float32)) for _ in range(3)]
    pair.begin(*requests)
    pair.execute(
        lambda given: [
            utils.InferenceResponse([utils.Tensor("OUT", np.ones(2, np.float32))], parameters={"a": 1}),
            utils.InferenceResponse(error=utils.TritonError("told", utils.TritonError.NOT_FOUND)),
            utils.InferenceResponse([utils.Tensor("OUT", np.array([object(), "x"], object)[1:])]),
        ]
    )
    pair.server.drain()
    got = [response for _, response, _ in pair.answers.got]
    assert got[0].parameters == {"a": 1} and to_numpy(got[0].outputs[0]).tolist() == [1, 1]
    assert isinstance(got[1].error, TritonError) and got[1].error.code.name == "NOT_FOUND"
    assert to_numpy(got[2].outputs[0]).tolist() == [b"x"]
    assert len(pair.finished_batches) == 1


def test_a_tensor_that_cannot_be_sent_fails_its_own_request(pair: Pair) -> None:
    class Odd(utils.Tensor):
        def as_numpy(self) -> np.ndarray:
            raise ValueError("no bytes here")

    odd = utils.Tensor._over("OUT", 11, (1,), None, lambda _: 1 / 0, False)
    pair.begin(*(pair.request(IN=np.zeros(1, np.float32)) for _ in range(2)))
    fine = utils.Tensor("OUT", np.ones(1, np.float32))
    pair.execute(lambda given: [utils.InferenceResponse([fine, odd]), utils.InferenceResponse([fine])])
    pair.server.drain()
    first, second = (response for _, response, _ in pair.answers.got)
    assert "cannot use an output tensor: division by zero" in str(first.error)
    assert to_numpy(second.outputs[0]).tolist() == [1]


# ---------------------------------------------------------------- copies


KEPT = {
    "nothing": lambda response, array: None,
    "response": lambda response, array: response,
    "tensors": lambda response, array: response.output_tensors(),
    "tensor": lambda response, array: response.output_tensors()[0],
    "array": lambda response, array: array,
    "view": lambda response, array: array[1:],
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("pair", ["compiled"], indirect=True)  # the other copies every output once
def test_an_answer_that_the_model_can_still_change_is_copied(pair: Pair, kept: str) -> None:
    held: list[Any] = []

    def execute(requests: list[utils.InferenceRequest]) -> Any:
        made = pair.child.empty((BIG,), np.dtype(np.uint8))
        made[:] = 3
        response = utils.InferenceResponse([utils.Tensor("OUT", made)])
        held.append(KEPT[kept](response, made))
        return [response]

    (tensor,) = pair.outputs(execute, IN=np.zeros(1, np.float32))
    assert pair.server.in_place == (BIG if kept == "nothing" else 0)
    if kept == "response":  # the model goes on working on it while it is sent
        held[0].output_tensors()[0].as_numpy()[:] = 9
    assert (to_numpy(tensor) == 3).all()
    tensor = None
    held.clear()


@pytest.mark.parametrize("pair", ["compiled"], indirect=True)  # the other copies every output once
def test_copies_of_large_tensors(pair: Pair) -> None:
    """docs/isolation.md counts them; here an address tells a copy from a view."""
    array = np.arange(BIG, dtype=np.float32)

    def identity(requests: list[utils.InferenceRequest]) -> Any:
        return answer(requests[0].inputs()[0].as_numpy())(requests)

    def utilities(requests: list[utils.InferenceRequest]) -> Any:
        made = pair.child.empty((BIG,), np.dtype(np.float32))
        made[:] = 3
        return answer_of(made)

    def answer_of(made: np.ndarray) -> Any:
        return [utils.InferenceResponse([utils.Tensor("OUT", made)])]

    def looks(requests: list[utils.InferenceRequest]) -> Any:
        input = requests[0].inputs()[0].as_numpy()
        assert not input.flags.owndata and input.flags.writeable  # a view, which the model may write to
        return answer_of(input + 1)

    (tensor,) = pair.outputs(looks, IN=array)  # in: one copy into the slab; out: one copy into the slab
    assert pair.place(tensor.address) == "outputs" and to_numpy(tensor)[5] == 6
    (tensor,) = pair.outputs(identity, IN=array)  # in: one copy; out: none, it is the input's own memory
    assert pair.place(tensor.address) == "inputs" and to_numpy(tensor)[7] == 7
    made = pair.child.statistics()["used"]
    (tensor,) = pair.outputs(utilities, IN=array)  # out: none, it was made there
    assert pair.place(tensor.address) == "outputs" and to_numpy(tensor)[9] == 3
    assert pair.child.statistics()["used"] - made < 1.5 * array.nbytes
    (tensor,) = pair.outputs(lambda r: answer_of(np.ones(4, np.int8)), IN=array)  # small: copied out at once
    assert pair.place(tensor.address) == ""


@pytest.mark.parametrize("pair", ["compiled"], indirect=True)
def test_an_array_that_the_model_keeps_is_copied(pair: Pair) -> None:
    kept: list[np.ndarray] = []

    def execute(requests: list[utils.InferenceRequest]) -> Any:
        kept.append(pair.child.empty((BIG,), np.dtype(np.float32)))
        kept[-1][:] = len(kept)
        return [utils.InferenceResponse([utils.Tensor("OUT", kept[-1])])]

    (tensor,) = pair.outputs(execute, IN=np.zeros(1, np.float32))
    kept[0][:] = 99  # the response must not see this
    assert to_numpy(tensor)[0] == 1


OTHERS = {
    "nothing": lambda array: [],
    "array": lambda array: [array],
    "view": lambda array: [array[1:]],
    "memory": lambda array: [memoryview(array)],
}


@pytest.mark.parametrize("shape", [(BIG,), (2, BIG // 2)])
@pytest.mark.parametrize("kept", OTHERS)
def test_an_input_of_which_the_model_keeps_another_array_is_copied(
    pair: Pair, kept: str, shape: tuple[int, ...]
) -> None:
    """Each as_numpy() of an input makes an array over the same memory."""
    held: list[Any] = []

    def execute(requests: list[utils.InferenceRequest]) -> Any:
        (tensor,) = requests[0].inputs()
        held.extend(OTHERS[kept](tensor.as_numpy()))
        return [utils.InferenceResponse([utils.Tensor("OUT", tensor.as_numpy())])]

    (tensor,) = pair.outputs(execute, IN=np.full(shape, 7, np.float32))
    for memory in held:
        np.asarray(memory)[:] = 99  # the response must not see this
    assert (to_numpy(tensor) == 7).all()
    if kept == "nothing" and isinstance(pair.child, model_side.ModelSide):
        assert pair.place(tensor.address) == "inputs"


def test_an_input_of_an_earlier_batch_is_copied(pair: Pair) -> None:
    kept: list[Any] = []
    array = np.arange(BIG, dtype=np.float32)

    def keeps(requests: list[utils.InferenceRequest]) -> Any:
        kept.append(requests[0].inputs()[0].as_numpy())
        return answer(np.zeros(1, np.float32))(requests)

    pair.outputs(keeps, IN=array)
    (tensor,) = pair.outputs(
        lambda r: [utils.InferenceResponse([utils.Tensor("OUT", kept.pop())])], IN=array + 1
    )
    assert to_numpy(tensor)[3] == 3


# ---------------------------------------------------------------- memory


def settle(pair: Pair) -> dict[str, Any]:
    gc.collect()
    pair.server.drain()
    pair.child.take_returns()
    pair.server.look()  # frees what the process has copied
    return {**pair.server.statistics(), **{f"child_{k}": v for k, v in pair.child.statistics().items()}}


@pytest.mark.slow
def test_everything_is_given_back(pair: Pair) -> None:
    array = np.arange(BIG, dtype=np.float32)
    for _ in range(40):  # far more than fits at once
        (tensor,) = pair.outputs(
            lambda requests: answer(requests[0].inputs()[0].as_numpy() + 1)(requests), IN=array
        )
        assert to_numpy(tensor)[0] == 1
        tensor = None
        pair.answers.got.clear()
        pair.finished_batches.clear()
    held = settle(pair)
    assert (held["lent"], held["used"], held["child_lent"]) == (0, 0, 0)
    assert held["child_passing"] <= 1  # freed with the next message


@pytest.mark.slow
def test_an_input_that_the_model_keeps_stays_what_it_is(pair: Pair) -> None:
    kept = []
    for i in range(4):

        def execute(requests: list[utils.InferenceRequest]) -> Any:
            kept.append(requests[0].inputs()[0].as_numpy())
            return answer(np.zeros(1, np.float32))(requests)

        pair.outputs(execute, IN=np.full(BIG // 10, i, np.float32))
    assert [array[-1] for array in kept] == [0, 1, 2, 3]
    assert settle(pair)["lent"] == 4
    kept.clear()
    assert settle(pair)["lent"] == 0


@pytest.mark.slow
def test_messages_larger_than_the_slab_take_segments_of_their_own(pair: Pair) -> None:
    array = np.arange(AREA, dtype=np.int32)  # four times the area
    (tensor,) = pair.outputs(
        lambda requests: answer(requests[0].inputs()[0].as_numpy() * 2)(requests), IN=array
    )
    assert to_numpy(tensor)[1000] == 2000
    held = settle(pair)
    assert held["used"] == 0 and held["lent"] == 0


def test_what_a_message_in_a_segment_of_its_own_names_is_given_back() -> None:
    """A large output lies in the process's area, which has no room for the message that names it."""
    pair = Pair()
    rest = []

    def execute(requests: list[utils.InferenceRequest]) -> Any:
        array = pair.child.empty((BIG // 10,), np.dtype(np.float32))
        array[:] = 7
        for size in (1 << 16, 1 << 12, 256):
            while (made := pair.child.empty((size,), np.dtype(np.uint8))) is not None:
                rest.append(made)
        return [utils.InferenceResponse([utils.Tensor("OUT", array)])]

    (tensor,) = pair.outputs(execute, IN=np.zeros(1, np.float32))
    assert pair.place(tensor.address) == "outputs" and to_numpy(tensor)[-1] == 7
    assert settle(pair)["child_lent"] == 1
    tensor = None
    pair.answers.got.clear()
    pair.finished_batches.clear()
    assert settle(pair)["child_lent"] == 0
    rest.clear()
    assert settle(pair)["child_used"] == 0
    pair.close()


def test_no_collection_runs_while_a_message_is_taken() -> None:
    """What it frees might run code that takes from the same ring."""
    assert not given.GivenMessage.__flags__ & 1 << 14  # Py_TPFLAGS_HAVE_GC


def test_the_server_waits_in_line_when_the_ring_is_full(pair: Pair) -> None:
    requests = [pair.request(IN=np.full(1, i, np.float32)) for i in range(300)]
    for request in requests:
        pair.begin(request)
    assert pair.server.waiting and pair.server.occupancy == 256 and pair.lags == 1
    assert pair.server.look()  # nothing was taken meanwhile: it asks again
    for _ in range(300):
        pair.execute(lambda given: answer(given[0].inputs()[0].as_numpy())(given))
        pair.server.look()
    while pair.server.drain():
        pass
    assert [to_numpy(r.outputs[0])[0] for _, r, _ in pair.answers.got] == list(range(300))


def test_the_end_of_the_process_gives_back_what_it_had(pair: Pair) -> None:
    requests = [pair.request(IN=np.zeros(1, np.float32)) for _ in range(3)]
    pair.begin(requests[0])
    pair.execute(answer(np.zeros(1, np.float32)))
    batches = [pair.begin(request) for request in requests[1:]]
    pair.server.drain()
    assert pair.server.end() == (batches, []) and pair.server.end() == ([], [])
    assert len(pair.answers.got) == 1 and not pair.server.drain()


@pytest.fixture(params=["compiled", "plain"])
def senders(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Pair, Callable[..., list[tuple[int, int]]], int, int]]:
    """(pair, say, one, two): say() sends (id, size[, final]) as responses and returns what it is told: (id, size)."""
    pair = Pair(decoupled=True, plain=request.param == "plain")
    pair.begin(pair.request(IN=np.zeros(1, np.float32)), pair.request(IN=np.zeros(1, np.float32)))
    _, number, message, _ = pair.child.take()
    one, two = (channel_of(received).id for received in pair.child.requests(number, message))
    made = utils.InferenceResponse([utils.Tensor("OUT", np.ones(1, np.float32))])

    def say(*responses: tuple[int, int] | tuple[int, int, bool]) -> list[tuple[int, int]]:
        for id, size, *final in responses:
            pair.child.respond(id, made, None, bool(final), size)
        pair.server.drain()
        told = []
        while pair.child.has_control:
            taken = pair.child.take_control()
            if taken is None:
                break
            kind, id, _, length = taken
            assert kind == kinds.ACKNOWLEDGE
            told.append((id, length))
        return told

    yield pair, say, one, two
    pair.close()


def test_a_sender_is_told_when_it_may_be_short_of_room(senders: Any) -> None:
    """Each acknowledgement may wake the process."""
    pair, say, one, _ = senders
    assert say((one, 5), (one, UNTOLD_BYTES - 6)) == []
    assert say((one, 1)) == [(one, UNTOLD_BYTES)]
    assert say((one, 1)) == []
    assert say((one, 3 * UNTOLD_BYTES)) == [(one, 3 * UNTOLD_BYTES + 1)]
    assert len(pair.answers.got) == 5


def test_each_sender_is_told_of_its_own_responses(senders: Any) -> None:
    _, say, one, two = senders
    most = UNTOLD_BYTES - 1
    assert say((one, most), (two, most)) == []
    assert say((one, 1), (two, 2)) == [(one, UNTOLD_BYTES), (two, UNTOLD_BYTES + 1)]


def test_the_final_response_is_not_acknowledged(senders: Any) -> None:
    pair, say, one, two = senders
    assert say((one, UNTOLD_BYTES, True)) == []
    assert say((two, 1), (two, UNTOLD_BYTES, True)) == []
    assert [final for _, _, final in pair.answers.got] == [True, False, True]


def test_the_sender_of_a_request_that_has_ended_is_told_at_once(senders: Any) -> None:
    """Nobody reads it any more, and its model is to learn that it may go on."""
    pair, say, one, two = senders
    assert say((one, 7), (two, 7)) == []
    complete(pair.answers.got[0][0], InferResponse(None, Internal("over", reason=Reason.BACKEND)), True)
    assert say((one, 1), (two, 2)) == [(one, 1)]
    assert say((one, 3), (one, 4, True)) == [(one, 3)]
    assert say((two, UNTOLD_BYTES)) == [(two, UNTOLD_BYTES + 9)]


@pytest.mark.parametrize("how", ["failed", "rescheduled", "open"])
def test_nothing_is_kept_of_senders_that_cannot_go_on(how: str) -> None:
    """What they were not told of goes with the result of their batch, or with their final response."""
    pair = Pair(decoupled=True)
    try:
        pair.begin(pair.request(IN=np.zeros(1, np.float32)))
        _, number, message, _ = pair.child.take()
        (received,) = pair.child.requests(number, message)
        id = channel_of(received).id
        pair.child.respond(id, utils.InferenceResponse([]), None, False, 5)
        pair.server.drain()
        assert pair.server.statistics()["untold"] == 1
        if how == "failed":
            pair.child.failure(number, 1, 2, 3, 4, "raised")
        else:
            answer = OPEN_ANSWER if how == "open" else RESCHEDULED_ANSWER
            pair.child.result(number, 1, 2, 3, 4, [answer], lambda text: text, message)
        pair.server.drain()
        assert pair.server.statistics()["untold"] == (how == "open")
        if how == "open":
            pair.child.respond(id, None, None, True, 5)
            pair.server.drain()
            assert pair.server.statistics()["untold"] == 0
    finally:
        pair.close()


# ---------------------------------------------------------------- calls


def test_a_call_there_and_back(pair: Pair) -> None:
    request = utils.InferenceRequest(
        request_id="r",
        correlation_id=7,
        inputs=[utils.Tensor("X", np.arange(3, dtype=np.int64))],
        requested_output_names=["Y"],
        model_name="other",
        model_version=2,
        parameters={"p": "q"},
    )
    pair.child.call(5, request, False, True, None, 0)
    pair.server.drain()
    ((key, made, decoupled, blocking),) = pair.calls
    assert (key, decoupled, blocking) == (5, False, True)
    assert (made.model_name, made.model_version, made.id, made.sequence_id) == ("other", "2", "r", 7)
    assert made.parameters == {"p": "q"} and [o.name for o in made.outputs] == ["Y"]
    assert to_numpy(made.inputs[0]).tolist() == [0, 1, 2]

    pair.server.respond(
        5, InferResponse([from_numpy("Y", np.ones(2, np.float32))], None, {"a": 1}), True, True, {}
    )
    kind, key, message, _ = pair.child.take()
    response, final, times = pair.child.response(message)
    assert times is None
    assert (kind, key, final) == (kinds.ANSWER, 5, True)
    assert response.output_tensors()[0].as_numpy().tolist() == [1, 1] and json.loads(
        response.parameters()
    ) == {"a": 1}
    pair.server.respond(6, InferResponse(None, TritonError("no")), False, False, {})
    kind, key, message, _ = pair.child.take_control()
    response, final, times = pair.child.response(message)
    assert times is None
    assert (kind, key, final) == (kinds.CALL_RESPONSE, 6, False)
    assert response.error().message() == "no"


@pytest.mark.parametrize(("size", "by_thread"), [(1 << 20, 0), (2 << 20, 1)])
def test_who_copies_a_large_batch(size: int, by_thread: int) -> None:
    """A MiB takes the loop less time than waking a thread; more must not hold it up."""
    pair = Pair(area=8 << 20)
    try:
        array = np.arange(size, dtype=np.uint8)
        (tensor,) = pair.outputs(lambda r: answer(r[0].inputs()[0].as_numpy())(r), IN=array)
        assert (to_numpy(tensor) == array).all()
        assert pair.mailbox.submitted == by_thread
    finally:
        tensor = None
        pair.close()


class Later:
    """Copies when the test says so."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def submit(self, copy: Any) -> None:
        self.copies.append(copy)


@pytest.mark.parametrize("how", ["ended", "returned"])
def test_a_copy_outlives_the_process_that_it_is_for(how: str) -> None:
    """What a thread copies to stays until it has: the process may end meanwhile, or return what it was not given yet."""
    pair = Pair(area=1 << 20, plain=True)
    later = pair.mailbox = Later()  # type: ignore[assignment]
    try:
        pair.begin(pair.request(IN=np.arange(4 << 20, dtype=np.uint8)))  # in a segment of its own
        (copy,) = later.copies
        if how == "ended":
            pair.server.end()
        else:
            (number,) = pair.segments
            pair.child.release(kinds.TOP | number)
            pair.server.drain()
        copy.execute()
        copy.deliver()
    finally:
        pair.close()


def _answered(pair: Pair, due: Callable[[], bool]) -> None:
    """The model's end waits for an answer, which the server sends once `due()`."""
    came: list[bool] = []
    thread = threading.Thread(target=lambda: came.append(pair.child.wait_answer()))
    thread.start()
    until(due)
    pair.server.respond(5, InferResponse([], None, {}), True, True, {})
    thread.join()
    assert came == [True]
    assert pair.child.take()[0] == kinds.ANSWER


def test_asking_for_answers_in_vain_becomes_rarer() -> None:
    """An answer is asked for before the process sleeps; after it was in vain 1, 3, 7 and so on are not."""
    pair = Pair(spin_ns=1)
    seen = []
    for left in (1, 0, 3, 2, 1, 0, 7):
        _answered(pair, lambda left=left: pair.child.not_now == left)
        seen.append(pair.child.not_now)
    assert seen == [1, 0, 3, 2, 1, 0, 7]
    pair.close()


def test_an_answer_that_comes_while_it_is_asked_for_is_not_in_vain() -> None:
    pair = Pair(spin_ns=3600 * 10**9)
    for _ in range(3):
        _answered(pair, lambda: True)
    assert pair.child.not_now == 0
    pair.close()
