"""Tensors in trace files: text that comes back as what it was, and text that does not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neptrio import datatypes
from neptrio.observe.tensor_copy import TensorCopy
from neptrio.observe.trace_record import tensor_text
from neptrio.request.numpy_tensor import from_numpy
from neptrio.traces.values import array_of, flat, shape_of
from tests.support.traced import HARD


def document(array: np.ndarray, limit: int = 1 << 20) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(b"".join(tensor_text(TensorCopy(from_numpy("T", array), limit))))
    return made


@pytest.mark.parametrize("name", sorted(HARD))
def test_every_datatype_comes_back_exactly(name: str) -> None:
    array = HARD[name].reshape(2, 2)
    back = array_of(document(array))
    assert back.dtype == array.dtype and back.shape == (2, 2)
    if name == "BYTES":
        assert back.tolist() == array.tolist()
    else:
        assert back.tobytes() == array.tobytes()


FLOATS = sorted(name for name in HARD if "F" in name)


@given(st.sampled_from(FLOATS), st.binary(min_size=32, max_size=32))
def test_any_bits_of_a_number_come_back(name: str, raw: bytes) -> None:
    array = np.frombuffer(raw, datatypes.NUMPY[datatypes.NUMBER[name]])
    back = array_of(document(array))
    numbers = ~np.isnan(array.astype(np.float64))
    assert back[numbers].tobytes() == array[numbers].tobytes()
    assert np.isnan(back[~numbers].astype(np.float64)).all()


@pytest.mark.slow
@given(
    st.lists(
        st.binary(max_size=12) | st.text(alphabet='\\",a\u2028\n', max_size=6).map(str.encode), max_size=5
    )
)
def test_any_strings_come_back(elements: list[bytes]) -> None:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    assert array_of(document(array)).tolist() == elements


def test_empty_and_scalar_shapes() -> None:
    assert array_of(document(np.zeros((0, 3), np.float32))).shape == (0, 3)
    assert array_of(document(np.zeros((), np.int32))).shape == ()


def test_what_is_cut_off_is_marked() -> None:
    found = document(np.arange(100, dtype=np.int32).reshape(10, 10), limit=43)
    assert found["data"] == "0,1,2,3,4,5,6,7,8,9" and found["shape"] == "10"
    assert shape_of(found, "truncated_from") == (10, 10) and flat(found).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dtype": "INT8", "data": "\x01,\x02", "shape": "2"}, "its text is not one of INT8 elements"),
        ({"dtype": "UINT8", "data": "300", "shape": "1"}, "not one of UINT8"),
        ({"dtype": "BOOL", "data": "2", "shape": "1"}, "not one of BOOL"),
        ({"dtype": "FP16", "data": "", "shape": "4"}, r"its shape \[4\] has 4 elements, its text has 0"),
        ({"dtype": "INT32", "data": "1,2", "shape": "x"}, "invalid literal"),
        ({"dtype": "BYTES", "base64": "!", "data": "", "shape": "1"}, "base64|padding|Only|alphabet"),
        ({"dtype": "COMPLEX", "data": "1", "shape": "1"}, "its datatype is 'COMPLEX'"),
        ({"dtype": "FP32", "data": "", "omitted": "the tensor is in GPU memory"}, "GPU memory"),
    ],
)  # fmt: skip
def test_text_that_says_nothing(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        array_of(tensor)
