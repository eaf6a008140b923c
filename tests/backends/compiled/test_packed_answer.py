"""Answers as a cache keeps them: what was packed comes back, and nothing else does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from neptrio.backends.compiled.packed_answer import (
    ALIGNED,
    CODE_BYTES,
    COUNT,
    HEAD,
    Unusable,
    packed,
    packed_bytes,
    seal,
    unpack,
)
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import from_numpy, to_numpy

KEY, SECRET = b"key", b"secret"
ARRAYS: dict[str, Any] = {
    "numbers": np.arange(6, dtype=np.int64).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.array(True),
    "texts": np.array([[b"a"], [b""], [b"longer than four"]], object),
}


def sealed(block: bytearray, key: bytes = KEY) -> bytearray:
    seal(block, key, SECRET)
    return block


def block() -> bytearray:
    return sealed(packed([from_numpy(name, array) for name, array in ARRAYS.items()]))


def test_what_was_packed_comes_back() -> None:
    made = block()
    assert len(made) <= packed_bytes([from_numpy(name, array) for name, array in ARRAYS.items()])
    found = unpack(made, KEY, SECRET)
    start = from_numpy("block", np.frombuffer(made, np.uint8)).address
    assert [tensor.name for tensor in found] == list(ARRAYS)
    for tensor, array in zip(found, ARRAYS.values(), strict=True):
        np.testing.assert_array_equal(to_numpy(tensor), array)
        assert tensor.shape == array.shape
        assert (tensor.address - start) % ALIGNED == 0
        assert memoryview(tensor).readonly


def test_an_answer_to_another_question_or_of_another_server_is_none() -> None:
    for key, secret in ((b"other", SECRET), (KEY, b"another")):
        with pytest.raises(Unusable, match="not what was stored"):
            unpack(block(), key, secret)
    for size in (0, CODE_BYTES - 1, CODE_BYTES):
        with pytest.raises(Unusable, match="not what was stored"):
            unpack(block()[:size], KEY, SECRET)
    with pytest.raises(Unusable, match="not what was stored"):
        unpack(block() + b"\0", KEY, SECRET)


def one(shape: tuple[int, ...], dtype: int, data: bytes, **other: Any) -> bytearray:
    """A block of one tensor whose numbers need not fit, with a good code."""
    made = bytearray(CODE_BYTES) + COUNT.pack(other.get("count", 1))
    name = other.get("name", b"T")
    made += HEAD.pack(
        other.get("name_size", len(name)), dtype, other.get("rank", len(shape)), other.get("size", len(data))
    )
    made += b"".join(number.to_bytes(8, "little", signed=True) for number in shape) + name
    made += bytes(-len(made) % ALIGNED) + data
    return sealed(made)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (one((2,), 8, b"1234"), r"shape \[2\] in 4 bytes"),
        (one((-1,), 8, b"1234"), r"shape \[-1\]"),
        (one((1 << 62, 4), 8, b""), "shape"),
        (one((1 << 30, 1 << 30), 2, b""), "shape"),
        (one((1,), 0, b"1"), "datatype 0"),
        (one((1,), 15, b"1"), "datatype 15"),
        (one((1,), 8, b"1234", rank=255), "255 dimensions"),
        (one((1,), 8, b"1234", rank=60), "requires a buffer"),
        (one((1,), 8, b"1234", size=1 << 60), "ends within a tensor"),
        (one((1,), 8, b"1234", name_size=60000), "ends within a name"),
        (one((1,), 8, b"1234", name=b"\xff"), "utf-8"),
        (one((1,), 8, b"12345678", size=4), "left over"),
        (one((1,), 8, b"1234", count=0), "left over"),
        (one((1,), 8, b"1234", count=2), "requires a buffer|ends within|datatype|dimensions"),
        (one((1,), 8, b"1234", count=1 << 31), "tensors"),
        (one((2,), 13, b"\1\0\0\0a"), "1 strings where"),
        (one((1,), 13, b"\5\0\0\0a"), "strings where"),
        (one((1,), 13, b"\1\0\0\0a\0"), "requires a buffer"),
    ],
)
def test_numbers_are_checked_against_the_bytes_that_there_are(made: bytearray, why: str) -> None:
    """Also where the code is right: with a namespace others can make one."""
    with pytest.raises(Unusable, match=why):
        unpack(made, KEY, SECRET)


def test_whatever_the_bytes_are_they_are_tensors_or_unusable() -> None:
    chance = random.Random(44)
    good, taken = block(), 0
    for _ in range(3000):
        made = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            made[chance.randrange(CODE_BYTES, len(made) if chance.random() < 0.3 else 120)] = chance.choice(
                (0, 1, 255, 13)
            )
        if chance.random() < 0.3:
            del made[chance.randrange(CODE_BYTES, len(made)) :]
        try:
            found = unpack(sealed(made), KEY, SECRET)
        except Unusable:
            continue
        taken += 1
        for tensor in found:
            assert isinstance(tensor, Tensor) and to_numpy(tensor).shape == tensor.shape
    assert taken > 10
