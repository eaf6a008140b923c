"""Inflating and deflating in steps: the same content as zlib's, work in proportion to the body."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neptrio.codec import inflate
from neptrio.codec.inflate import STEP_BYTES, Deflater, Inflater, TooLong, Undecodable

EMPTY = gzip.compress(b"", mtime=0)
LIMIT = 64 << 20


def inflated(data: bytes, limit: int = LIMIT, **how: Any) -> bytes:
    made = Inflater(31, data, limit, members=True)
    while not made.step(**how):
        pass
    return bytes(made.content)


@given(
    st.lists(st.tuples(st.binary(max_size=100), st.integers(0, 9), st.integers(1, 300)), max_size=4),
    st.integers(1, 5000),
    st.integers(1, 50),
)
def test_the_content_is_that_of_the_members(
    parts: list[tuple[bytes, int, int]], most: int, calls: int
) -> None:
    contents = [part * times for part, _, times in parts]
    data = b"".join(gzip.compress(c, level) for c, (_, level, _) in zip(contents, parts, strict=True))
    if data:
        assert inflated(data, most=most, calls=calls) == b"".join(contents)


@given(st.lists(st.binary(max_size=5000), max_size=6))
def test_what_is_deflated_is_inflated_again(parts: list[bytes]) -> None:
    deflater = Deflater(31, 6, parts)
    while not deflater.step():
        pass
    assert gzip.decompress(b"".join(deflater.out)) == b"".join(parts)


def test_a_large_answer_is_deflated_in_steps() -> None:
    parts = [bytes(STEP_BYTES + 1), bytes(3 * STEP_BYTES), b"end"]
    deflater, steps = Deflater(15, 1, parts), 1
    while not deflater.step():
        steps += 1
    assert steps == 5
    assert zlib.decompress(b"".join(deflater.out)) == b"".join(parts)


class Counted:
    """zlib's decoder, counting what it was given and what it copied back."""

    touched = 0
    real: Any = zlib.decompressobj

    def __init__(self, bits: int) -> None:
        self._decoder = Counted.real(bits)

    def decompress(self, data: Any, most: int) -> bytes:
        part = self._decoder.decompress(data, most)
        Counted.touched += len(data) + len(self._decoder.unused_data) + len(self._decoder.unconsumed_tail)
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


@pytest.mark.parametrize("members", [1000, 4000, 16000])
def test_empty_members_cost_as_much_as_there_are(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What zlib is given and gives back grows with the body, not with its square."""
    monkeypatch.setattr(inflate.zlib, "decompressobj", Counted)
    monkeypatch.setattr(Counted, "touched", 0)
    data = EMPTY * members + gzip.compress(b"end")
    assert inflated(data) == b"end"
    assert Counted.touched < 64 * len(data)


def test_a_step_makes_no_more_than_it_was_asked_for() -> None:
    made = Inflater(31, gzip.compress(bytes(5 << 20)), LIMIT)
    sizes = []
    while not made.step():
        sizes.append(len(made.content))
    assert sizes[0] == STEP_BYTES and sizes[-1] <= 5 << 20
    assert len(made.content) == 5 << 20


def test_a_step_ends_although_nothing_comes_of_it() -> None:
    """Empty members, and empty blocks within one member: much input, no output."""
    assert not Inflater(31, EMPTY * 5000, LIMIT, members=True).step()
    assert not Inflater(15, b"\x78\x01" + b"\0\0\0\xff\xff" * 1_000_000, LIMIT).step()


def test_a_bomb_ends_at_the_limit() -> None:
    made = Inflater(31, gzip.compress(bytes(3 << 20)), 2 << 20)
    with pytest.raises(TooLong):
        while not made.step():
            pass
    assert len(made.content) <= (2 << 20) + 1
    assert inflated(gzip.compress(bytes(1000)), limit=1000) == bytes(1000)


@pytest.mark.parametrize(
    ("bits", "data", "left"),
    [
        (31, b"", -1),
        (31, gzip.compress(b"x" * 1000, mtime=0)[:-1], -1),
        (31, EMPTY + EMPTY[:-1], -1),
        (15, zlib.compress(b"x") + b"more", 4),
        (31, b"no gzip at all", 0),
        (31, EMPTY + b"no gzip at all", 0),
    ],
)
def test_what_is_not_what_it_says(bits: int, data: bytes, left: int) -> None:
    made = Inflater(bits, data, LIMIT, members=bits == 31)
    with pytest.raises(Undecodable) as info:
        while not made.step():
            pass
    assert info.value.left == left
