"""A backend makes a trace for a request of its own, and is told when that was where, and with which tensors."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.backends.compiled.asking import text_of

pytestmark = pytest.mark.slow

TIMESTAMPS, TENSORS = 4, 8
STAGES = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"]
STAGES += ["COMPUTE_END", "REQUEST_END"]
QUEUED, BACKEND, OUT = (f"TENSOR_{which}" for which in ("QUEUE_INPUT", "BACKEND_INPUT", "BACKEND_OUTPUT"))
TENSOR = "INT32 1x1x 4"  # datatype, shape, bytes


def told(client: Any, how: str, model: str = "probe") -> list[str]:
    """What the trace of a request was told, in its order, with the backend's responses between: `how` is level, model, what
    the model is to do."""
    return text_of(client, f"watched {how}", model=model).split("|")[:-1]


def names(rows: list[str]) -> list[str]:
    """What of each row is no number."""
    return [row if row.startswith(("response", "no", "failed")) else row.split()[0] for row in rows]


@pytest.mark.parametrize("level", [TIMESTAMPS, 1, 2, TIMESTAMPS | 1 << 10])  # 1 and 2 are old names
def test_when_the_request_was_where(client: Any, level: int) -> None:
    before = time.monotonic_ns()
    rows = told(client, f"{level} identity")
    assert names(rows) == [*STAGES[:-1], "response, the last", "REQUEST_END", "released"]
    stamps = [int(row.split()[1]) for row in rows if " identity/" in row]
    times = [before, *stamps, time.monotonic_ns()]
    assert times == sorted(times)
    assert {row.split()[2] for row in rows if " identity/" in row} == {"identity/1/mine"}


def test_nothing_where_it_is_disabled(client: Any) -> None:
    assert told(client, "0 identity") == ["response, the last", "released"]


def test_with_which_tensors(client: Any) -> None:
    rows = told(client, f"{TENSORS} identity")
    # inputs are copies, outputs lie where the backend's allocator says
    assert rows == [
        f"{QUEUED} IN {TENSOR} 0 0 42 identity/1/mine",
        f"{BACKEND} IN {TENSOR} 0 0 42 identity/1/mine",
        f"{OUT} OUT {TENSOR} 1 3 42 identity/1/mine",
        "response, the last",
        "released",
    ]
    both = names(told(client, f"{TIMESTAMPS | TENSORS} identity"))
    compute = [*STAGES[2:4], BACKEND, OUT, *STAGES[4:6]]
    assert both == [*STAGES[:2], QUEUED, *compute, "response, the last", "REQUEST_END", "released"]


def test_a_raw_input_is_shown_as_it_was_given(client: Any) -> None:
    assert told(client, f"{TENSORS} identity raw")[0] == f"{QUEUED} raw <invalid>  4 0 0 42 identity/1/mine"


def test_several_responses(client: Any) -> None:
    rows = told(client, f"{TIMESTAMPS | TENSORS} stream stream")
    outputs = [row.split()[7] for row in rows if row.startswith(OUT)]
    assert outputs == ["0", "1", "2", "3", "4"] and names(rows)[:2] == [OUT, "response"]
    assert rows[-1] == "released" and rows.count("released") == 1
    assert names(rows)[-3:] == ["no response, the last", "REQUEST_END", "released"]
    assert [name for name in names(rows) if name in STAGES] == STAGES


def test_a_request_that_fails(client: Any) -> None:
    rows = told(client, f"{TIMESTAMPS | TENSORS} identity fail")
    assert names(rows)[-3:] == ["failed, the last", "REQUEST_END", "released"] and OUT not in names(rows)
    rows = told(client, f"{TIMESTAMPS} nowhere")
    assert names(rows) == ["REQUEST_START", "failed, the last", "REQUEST_END", "released"]
    assert rows[0].split()[2] == "nowhere/-1/mine"


def test_a_request_of_an_ensemble(client: Any) -> None:
    rows = told(
        client, f"{TIMESTAMPS} steps shown", model="batched"
    )  # the ensemble's step is executed by the other
    assert names(rows) == [*STAGES[:2], "response, the last", "REQUEST_END", "released"]


def test_before_it_has_a_request_and_children(client: Any) -> None:
    first, mine, another, child, of_child, *rest = told(client, "alone")
    id, parent, who, context = first.split()
    assert int(id) > 1 << 62 and (parent, who, context) == ("7", "/-1/", "''")
    assert mine == 'CUSTOM_ACTIVITY 5 /-1/ {"5":"a \\"name\\""}'
    assert another == 'CUSTOM_ACTIVITY 6 /-1/ {"mine": 1,"6":"ANOTHER"}'
    assert child == "1 1" and of_child == 'CUSTOM_ACTIVITY 7 /-1/ {"mine": 1,"7":"OF A CHILD"}'
    ways = [*STAGES[:-1], "response, the last", "REQUEST_END", "released"]
    assert names(rest[:9]) == ways
    assert rest[0].split(" ", 3)[3] == '{"mine": 1 }'  # its parent's, as it was set
    assert rest[9].startswith("3 TRITONSERVER_InferenceTraceDelete: Trace handle")
    assert rest[10].startswith("3 TRITONSERVER_InferenceTraceId: Trace handle")
    assert names(rest[11:-1]) == ways and rest[-1] == "response, the last"


def test_it_is_given_back_once_whatever_becomes_of_the_request(client: Any) -> None:
    rows = told(client, "wrongly")
    released, no_callback, gone, not_there, in_use, deleted = rows
    assert released == "released"
    assert no_callback == "3 TRITONSERVER_ServerInferAsync: the request has no response callback"
    assert gone.startswith("3 TRITONSERVER_InferenceTraceId: Trace handle")
    assert not_there.startswith("3 TRITONSERVER_ServerInferAsync: Trace handle")
    assert in_use == (
        "3 TRITONSERVER_ServerInferAsync: the trace belongs to another request until it is released"
    )
    assert (
        deleted == "3 TRITONSERVER_InferenceTraceDelete: the trace belongs to a request until it is released"
    )
    assert told(client, "left") == [
        *rows,
        "response, the last",
        "released",
    ]  # of the request that was behind this one
