"""The JSON reader against rapidjson itself: the same documents, the same errors at the same offsets."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from neptrio.codec.json_reader import load
from neptrio.codec.json_writer import dump
from neptrio.errors import InvalidArgument

rapidjson = pytest.importorskip("rapidjson")  # comes with tritonclient[http]

PREFIX = "failed to parse the request JSON buffer: "
ALPHABET = '{}[]",:\\u0123dDeE+-.tfnaulrsNIinfy \n\x01b/xé'
SEEDS = [
    '{"a":1,"b":[1,2.5,"x\\n\\u00e9\\ud83d\\ude00",true,null,-1e5,NaN,-Infinity]}',
    '[[1,[2]],"abc",{}]',
    '{"a":{"b":{}}}',
    "123",
    '"x"',
]


def theirs(text: str) -> tuple[str, Any]:
    try:
        return "value", rapidjson.loads(text)
    except rapidjson.JSONDecodeError as error:
        at, _, reason = str(error).removeprefix("Parse error at offset ").partition(": ")
        return "error", f"{PREFIX}{reason} at {at}"


def ours(text: str) -> tuple[str, Any]:
    try:
        return "value", load(text.encode())
    except InvalidArgument as error:
        text, _, place = str(error).partition(" (")
        assert not place or place.endswith(")")
        return "error", text


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_damaged_documents_fail_as_rapidjson_fails() -> None:
    rng = random.Random(11)
    refused = 0
    for _ in range(20_000):
        text = list(rng.choice(SEEDS))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text) + 1)
            kind = rng.randrange(3)
            if kind == 0:
                text.insert(at, rng.choice(ALPHABET))
            elif at < len(text):
                text[at : at + 1] = [] if kind == 1 else [rng.choice(ALPHABET)]
        whole = "".join(text)
        expected, got = theirs(whole), ours(whole)
        assert expected[0] == got[0], whole
        if expected[0] == "error":
            refused += 1
            assert expected == got, whole
        elif '"a":' not in whole:  # duplicate keys differ on purpose: here the first counts
            assert same(expected[1], got[1]), whole
    assert refused > 5_000


@pytest.mark.parametrize("depth", [1, 50, 100])
def test_nesting_is_allowed(depth: int) -> None:
    assert load(b"[" * depth + b"]" * depth) is not None


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 101 + b"]" * 101])
def test_nesting_is_limited(text: bytes) -> None:
    with pytest.raises(InvalidArgument, match="Nesting deeper than 100 levels"):
        load(text)


def test_what_is_kept() -> None:
    assert load(b'\xef\xbb\xbf{"a":1,"\\u0061":2}') == {"a": 1}
    assert dump(load(b'"\xff\xc3\x28"')) == b'"\xff\xc3\x28"'
    assert load(b"1" * 300) == int("1" * 300)
    assert load(b"18446744073709551615") == (1 << 64) - 1
    assert load(b"18446744073709551616") == 1 << 64
    assert load(b"-9223372036854775809") == -(1 << 63) - 1


def test_long_numbers() -> None:
    with pytest.raises(InvalidArgument, match=r"Number too big to be stored in double\. at 1"):
        load(b"[" + b"9" * 10_000 + b"]")
    assert load(b"0." + b"3" * 10_000) == 1 / 3
    assert load(b"1" + b"0" * 5000 + b"e-5000") == 1.0


@pytest.mark.parametrize("text", ["0e309", "0e1111111110", "0.00e311", "-0E+400"])
def test_an_exponent_that_is_too_large_is_refused_of_zero_as_well(text: str) -> None:
    """As rapidjson does, which looks at the exponent alone."""
    with pytest.raises(InvalidArgument, match=r"Number too big to be stored in double\. at 1"):
        load(f"[{text}]".encode())


@pytest.mark.parametrize("text", ["0e308", "0.00e310", "0e-99999", "0.0"])
def test_zero_with_an_exponent(text: str) -> None:
    assert load(f"[{text}]".encode()) == [0.0]


def test_dump() -> None:
    value = {"a": [1, -2.5, None, True, False, "x\n\x1f\x00/é"], "b": {}, "c": (1,), "d": b"\xff"}
    assert dump(value) == (
        b'{"a":[1,-2.5,null,true,false,"x\\n\\u001F\\u0000/\xc3\xa9"],"b":{},"c":[1],"d":"\xff"}'
    )
    with pytest.raises(TypeError, match="set has no JSON form"):
        dump({1})
    long = "\x01" * 100_000
    assert load(dump(long)) == long
