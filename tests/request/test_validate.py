"""What a model remembers of requests that were right changes nothing about how the next one is judged."""

from __future__ import annotations

import itertools
import math

from neptrio.datatypes import NUMBER
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import InferRequest, InputSpec, ModelCore, Tensor
from neptrio.request.validate import validate

INT32, FP32, BYTES = NUMBER["INT32"], NUMBER["FP32"], NUMBER["BYTES"]

Given = tuple[str, int, tuple[int, ...], bytes]  # name, datatype, shape, data


def numbers(name: str, *shape: int, kind: int = INT32, nbytes: int | None = None) -> Given:
    """An input; with as many bytes as its shape says unless told otherwise."""
    return name, kind, shape, bytes(4 * math.prod(shape) if nbytes is None else nbytes)


TEXT: Given = ("TEXT", BYTES, (1, 1), b"\2\0\0\0ab")
CASES: dict[str, list[Given]] = {
    "one row": [numbers("A", 1, 4), numbers("B", 1, 2)],
    "two rows": [numbers("A", 2, 4), numbers("B", 2, 2)],
    "large": [numbers("A", 1, 4000), numbers("B", 1, 2)],
    "rows that differ": [numbers("A", 1, 4), numbers("B", 2, 2)],
    "rows that differ the other way": [numbers("A", 2, 4), numbers("B", 1, 2)],
    "without what is optional": [numbers("A", 2, 4)],
    "the second alone": [numbers("B", 1, 2)],
    "another order": [numbers("B", 1, 2), numbers("A", 1, 4)],
    "each other's shape": [numbers("A", 1, 2), numbers("B", 1, 4)],
    "repeated": [numbers("A", 1, 4), numbers("A", 1, 4)],
    "unknown": [numbers("A", 1, 4), numbers("C", 1, 2)],
    "another datatype": [numbers("A", 1, 4), numbers("B", 1, 2, kind=FP32)],
    "too few bytes": [numbers("A", 1, 4), numbers("B", 1, 2, nbytes=4)],
    "other bytes": [numbers("A", 1, 2, nbytes=16), numbers("B", 1, 2)],
    "too many rows": [numbers("A", 9, 4), numbers("B", 9, 2)],
    "no rows": [numbers("A", 0, 4), numbers("B", 0, 2)],
    "bytes of no rows": [numbers("A", 0, 4, nbytes=16), numbers("B", 0, 2, nbytes=8)],
    "too few dimensions": [numbers("A", 1, 4), numbers("B", 1, nbytes=8)],
    "nothing": [],
    "one more": [numbers("A", 1, 4), numbers("B", 1, 2), TEXT],
}
TEXTS: dict[str, list[Given]] = {
    "a text": [TEXT],
    "a longer shape": [("TEXT", BYTES, (2, 1), TEXT[3])],
    "a text that ends too early": [("TEXT", BYTES, (1, 1), b"\3\0\0\0ab")],
}


def numeric() -> ModelCore:
    """A model with two inputs, the second of which may be left out."""
    model = ModelCore("numeric", "1")
    model.max_batch_size = 8
    model.set_inputs([InputSpec("A", INT32, (-1,)), InputSpec("B", INT32, (2,), optional=True)])
    return model


def textual() -> ModelCore:
    """A model of strings."""
    model = ModelCore("textual", "1")
    model.max_batch_size = 8
    model.set_inputs([InputSpec("TEXT", BYTES, (-1,))])
    return model


def judged(model: ModelCore, given: list[Given]) -> int | str:
    """The batch size of a request with these inputs, or the error's text."""
    request = InferRequest()
    request.inputs = [Tensor(*each) for each in given]
    try:
        validate(request, model)
    except InvalidArgument as error:
        return str(error)
    return request.batch_size


def test_a_request_is_judged_alike_whatever_came_before() -> None:
    for make, cases in ((numeric, CASES), (textual, TEXTS)):
        alone = {name: judged(make(), given) for name, given in cases.items()}
        for names in itertools.product(cases, repeat=3):
            model = make()
            assert [judged(model, cases[name]) for name in names] == [alone[name] for name in names], names


def test_cases_are_right_and_wrong() -> None:
    right = {
        name: found for name, given in CASES.items() if isinstance(found := judged(numeric(), given), int)
    }
    assert right == {
        "one row": 1,
        "two rows": 2,
        "large": 1,
        "without what is optional": 2,
        "the second alone": 1,
        "another order": 1,
    }
    assert [isinstance(judged(textual(), given), int) for given in TEXTS.values()] == [True, False, False]
