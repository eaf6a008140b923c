"""Gather and split: one copy in, views out."""

from __future__ import annotations

import numpy as np
import pytest

from neptrio.errors import Internal, InvalidArgument
from neptrio.execution.gather import gather, split
from neptrio.request.infer_request import Tensor, tensor_at
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support.requests import request_of


def rows(*counts: int, width: int = 3) -> list[np.ndarray]:
    whole = np.arange(sum(counts) * width, dtype=np.int32).reshape(-1, width)
    return np.split(whole, np.cumsum(counts)[:-1])


@pytest.mark.parametrize("width", [3, 20_000])  # with and without the GIL
def test_requests_lie_next_to_each_other_in_their_order(width: int) -> None:
    parts = rows(2, 1, 3, width=width)
    whole = gather([request_of(X=part) for part in parts], "X")
    assert whole.shape == (6, width)
    np.testing.assert_array_equal(to_numpy(whole), np.concatenate(parts))


def test_one_request_is_not_copied() -> None:
    request = request_of(X=np.ones((2, 3), np.float32))
    assert gather([request], "X") is request.inputs[0]
    flat = gather([request], "X", True)
    assert flat.shape == (6,) and flat.address == request.inputs[0].address


def test_bytes_elements() -> None:
    a = request_of(X=np.array([[b"one", b""]], dtype=object))
    b = request_of(X=np.array([["three", "4"], ["5", "six"]], dtype=object))
    whole = gather([a, b], "X")
    assert to_numpy(whole).tolist() == [[b"one", b""], [b"three", b"4"], [b"5", b"six"]]
    first, second = split(whole, [(1, 2), (2, 2)])
    assert to_numpy(first).tolist() == [[b"one", b""]]
    assert to_numpy(second).tolist() == [[b"three", b"4"], [b"5", b"six"]]


def test_ragged_inputs_are_laid_end_to_end() -> None:
    a, b = np.arange(4, dtype=np.int64).reshape(1, 4), np.arange(6, dtype=np.int64).reshape(2, 3)
    whole = gather([request_of(X=a), request_of(X=b)], "X", True)
    assert whole.shape == (10,)
    np.testing.assert_array_equal(to_numpy(whole), np.concatenate([a.ravel(), b.ravel()]))


def test_an_input_nobody_has_is_none() -> None:
    two = [request_of(X=part) for part in rows(1, 1)]
    assert gather(two, "Y") is None and gather(two[:1], "Y") is None


def test_what_does_not_fit_together_is_refused() -> None:
    a = request_of(X=np.zeros((1, 2), np.int8))
    b = request_of(X=np.zeros((1, 3), np.int8))
    with pytest.raises(InvalidArgument, match=r"shapes \[1, 2\] and \[1, 3\] in one batch"):
        gather([a, b], "X")
    c = request_of(X=np.zeros((1, 2), np.int8), Y=np.zeros((1, 2), np.int8))
    for pair in ([a, c], [c, a]):
        with pytest.raises(InvalidArgument, match="'Y' is present in some requests of the batch only"):
            gather(pair, "Y")
    a.inputs = [tensor_at("X", 7, (1, 2), 4096, 2, None, 2)]
    with pytest.raises(InvalidArgument, match="GPU memory"):
        gather([a, a], "X")


def test_parts_are_views_that_keep_the_whole_alive() -> None:
    whole = from_numpy("Y", np.arange(12, dtype=np.int16).reshape(6, 2))
    address = whole.address
    parts = split(whole, [(1, 2), (5, 2)])
    del whole
    assert [part.address for part in parts] == [address, address + 4]
    np.testing.assert_array_equal(to_numpy(parts[1]), np.arange(2, 12, dtype=np.int16).reshape(5, 2))


@pytest.mark.parametrize("shapes", [[(1, 2)], [(3, 2), (4, 2)], [(7, 2)]])
def test_a_split_that_does_not_come_out_even_is_an_error(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(Internal, match="model 'm' returned output 'Y'"):
        split(from_numpy("Y", np.zeros((6, 2), np.int16)), shapes, "model 'm'")


def test_a_cut_off_bytes_output_is_an_error() -> None:
    with pytest.raises(Internal, match="does not divide"):
        split(Tensor("Y", 13, (2,), b"\x01\x00\x00\x00a\x05\x00\x00\x00bc"), [(1,), (1,)])


def test_shapes_with_more_elements_than_can_be_counted() -> None:
    """2**32 * 2**32 is 0 modulo 2**64, and is not none."""
    empty = Tensor("X", 11, (0,), b"")
    with pytest.raises(Internal, match="does not divide into the shapes"):
        split(empty, [(2**32, 2**32)])
    assert Tensor("X", 11, (2**60, 0, 2**60), b"").count() == 0
    with pytest.raises(InvalidArgument, match="impossible element count"):
        Tensor("X", 11, (2**32, 2**32), b"").count()
    with pytest.raises(InvalidArgument, match="impossible element count"):
        Tensor("X", 11, (3, -1), b"").count()
