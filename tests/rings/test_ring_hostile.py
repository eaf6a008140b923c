"""A model's process may write anything into the shared memory: the server fails its requests, and nothing else.

Each round is a new pair of ends. The process answers some of its batches like a correct one, then it
scribbles: over its ring, over its messages, over everything. The server takes what came; either it
believes an answer, or it names what cannot be and the batch is left for the end of the process to fail.
"""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.request.numpy_tensor import to_numpy
from neptrio.rings.message import Violation
from tests.support.rings import Pair
from triton_python_backend_utils._process import kinds

ROOT = Path(__file__).resolve().parents[2]
PARTS = 10
ROUNDS = int(os.environ.get("NEPTRIO_FUZZ_EXAMPLES", "10000"))
AREA = 1 << 16
ARRAY = np.arange(5000, dtype=np.float32)
TEXT = np.array([b"one", b"", b"three"], object)
EDGES = [0, 1, 2, 13, 14, 15, 64, 65, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def answer(requests: list[utils.InferenceRequest]) -> list[utils.InferenceResponse]:
    return [
        utils.InferenceResponse(
            [utils.Tensor("OUT", request.inputs()[0].as_numpy()), utils.Tensor("TEXT", TEXT)],
            parameters={"a": 1},
        )
        for request in requests
    ]


def look_at(pair: Pair) -> None:
    """Reads every byte of what the server believed."""
    for _, response, _ in pair.answers.got:
        for tensor in response.outputs or ():
            array = to_numpy(tensor)
            assert array.shape == tensor.shape and array.size * (0 if tensor.dtype == 13 else 1) <= 1 << 16
            array.tobytes() if tensor.dtype != 13 else array.tolist()
    pair.answers.got.clear()


def scribble(pair: Pair, chance: random.Random) -> None:
    """Writes something into what the process can write to: everything."""
    layout = pair.layout
    how = chance.randrange(6)
    tail = struct.unpack("<Q", pair.shared.read(layout.done, 8))[0]
    newest = layout.done + 256 + (tail - 1) % layout.done_entries * 32
    if how == 0:  # the newest descriptor: one field
        field, size = chance.choice([(0, 4), (4, 4), (8, 8), (16, 8), (24, 8)])
        value = chance.choice(EDGES) % 256**size
        pair.shared.write(newest + field, value.to_bytes(size, "little"))
    elif how == 1:  # its message: a few bytes
        offset, length = struct.unpack("<QQ", pair.shared.read(newest + 16, 16))
        length &= 2**63 - 1
        if layout.outputs <= offset < layout.size - 64:
            for _ in range(chance.randrange(1, 4)):
                at = offset + chance.randrange(max(1, min(length, 600)))
                value = chance.choice(EDGES)
                data = value.to_bytes(8, "little")[: chance.choice([1, 4, 8])]
                pair.shared.write(min(at, layout.size - 8), data)
    elif how == 2:  # an index
        ring = chance.choice([layout.work, layout.control, layout.done])
        value = (tail + chance.choice([-1, 1, 5, layout.done_entries + 1, 2**63])) % 2**64
        pair.shared.write(ring + 64 * chance.randrange(4), struct.pack("<Q", value))
    elif how == 3:  # noise anywhere
        size = chance.randrange(1, 2000)
        pair.shared.write(chance.randrange(layout.size - size), chance.randbytes(size))
    elif how == 4:  # a descriptor of its own making
        kind = chance.choice([16, 17, 18, 19, 20, 21, 24, 0, 2**32 - 1])
        entry = struct.pack(
            "<IIQQQ",
            kind,
            chance.choice([0, 8, 100, 5000, 2**32 - 1]),
            chance.choice([0, 1, 1 << 20, 2**64 - 1]),
            chance.choice([0, layout.inputs, layout.outputs, layout.size, layout.outputs + 64, 2**63 + 1]),
            chance.choice([0, 8, 5000, AREA, 2**63, 2**63 + 5000, 2**64 - 1]),
        )
        pair.shared.write(layout.done + 256 + tail % layout.done_entries * 32, entry)
        pair.shared.write(layout.done, struct.pack("<Q", tail + 1))
    else:  # strings and numbers of a message that is right otherwise
        offset, length = struct.unpack("<QQ", pair.shared.read(newest + 16, 16))
        length &= 2**63 - 1
        if layout.outputs <= offset and length > 64 and offset + length <= layout.size:
            pair.shared.write(offset + length - 64, chance.randbytes(8))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_scribbling_over_the_rings(part: int) -> None:
    """10,000 rounds in all, in processes of their own: both ends are in one, and stay as long as it does."""
    code = f"from tests.rings import test_ring_hostile as test; test.scribbling({part}, {ROUNDS // PARTS})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def scribbling(seed: int, rounds: int) -> None:
    """Nothing is answered twice, nothing is lost, nothing outside is touched."""
    before = len(os.listdir("/proc/self/fd"))
    chance = random.Random(seed)
    believed = refused = 0
    for _ in range(rounds):
        pair = Pair(AREA)
        under_way = []
        for _ in range(chance.randrange(1, 4)):
            requests = [
                pair.request(IN=ARRAY[: chance.choice([1, 5000])]) for _ in range(chance.choice([1, 2]))
            ]
            under_way.append(pair.begin(*requests))
        for _ in range(chance.randrange(1, len(under_way) + 1)):
            pair.execute(answer)
        for _ in range(chance.randrange(1, 4)):
            scribble(pair, chance)
        pair.server.drain()
        look_at(pair)
        for batch in pair.finished_batches:
            under_way.remove(batch)  # ValueError: answered twice
        believed += len(pair.finished_batches)
        refused += len(pair.violations)
        assert len(pair.violations) <= 1 and all(pair.violations)
        left, _ = pair.server.end()
        assert left == under_way  # and the instance fails exactly these
        pair.close()
    pair = requests = under_way = batch = left = None  # type: ignore[assignment]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # each pair had its memory and its bell
    assert believed > rounds // 10 and refused > rounds // 10


@pytest.mark.parametrize("offset", [0, 1 << 12, 1 << 63 | 1, 2**64 - 1])
def test_a_return_of_what_was_not_lent(offset: int) -> None:
    pair = Pair(1 << 18)
    batch = pair.begin(pair.request(IN=ARRAY))
    pair.shared.write(pair.layout.done + 256, struct.pack("<IIQQQ", kinds.RETURN, 0, 0, offset, 0))
    pair.shared.write(pair.layout.done, struct.pack("<Q", 1))
    assert not pair.server.drain()
    assert pair.violations == [f"a message at {offset} is returned that was not lent"]
    assert pair.server.end() == ([batch], [])
    pair.close()


def text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


HEAD = struct.pack("<QQQQII", 0, 0, 0, 0, 0, 1)
RESPONSE = struct.pack("<I", 0) + text(b"")


def tensor(dtype: int, shape: list[int], place: int, offset: int, nbytes: int, name: bytes = b"OUT") -> bytes:
    return (
        text(name)
        + struct.pack("<II", dtype, len(shape))
        + b"".join(struct.pack("<Q", n) for n in shape)
        + struct.pack("<IQQ", place, offset, nbytes)
    )


ONE = struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (HEAD[:-1], "0 answers to 1 requests"),
        (HEAD[:-4] + struct.pack("<I", 2), "2 answers to 1 requests"),
        (HEAD[:-8] + struct.pack("<II", 2, 1), "1 answers to 1 requests"),  # no part: nothing is left
        (HEAD[:-8] + struct.pack("<II", 2, 0), "0 answers to 1 requests"),
        (HEAD[:-8] + struct.pack("<II", 3, 1), "1 answers to 1 requests"),
        (HEAD + struct.pack("<I", 9) + text(b""), "an answer of kind 9"),
        (HEAD + RESPONSE + struct.pack("<I", 2**32 - 1), "ends too early"),
        (HEAD + RESPONSE + ONE + tensor(0, [1], 0, 0, 4), "datatype 0"),
        (HEAD + RESPONSE + ONE + tensor(15, [1], 0, 0, 4), "datatype 15"),
        (HEAD + RESPONSE + ONE + tensor(11, [2], 0, 0, 4), "2 elements of datatype 11 in 4 bytes"),
        (HEAD + RESPONSE + ONE + tensor(11, [2**63], 0, 0, 0), "more elements than there can be"),
        (HEAD + RESPONSE + ONE + tensor(11, [2**32, 2**32], 0, 0, 0), "more elements than there can be"),
        (HEAD + RESPONSE + ONE + tensor(11, [1] * 65, 0, 0, 4), "65 dimensions"),
        (HEAD + RESPONSE + ONE + tensor(11, [64], 0, 0, 256), "outside of its message"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 0, 2**64 - 4, 4), "outside of its message"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 1, 0, 4), "outside of the batch"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 1, 2**64 - 1, 4), "outside of the batch"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 2, 0, 4), "outside of the process's memory"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 3, 0, 4), "at place 3"),
        (HEAD + RESPONSE + ONE + tensor(13, [2], 0, 0, 8), "1 strings in a tensor of 2"),
        (HEAD + RESPONSE + ONE + tensor(13, [1], 0, 0, 6), "strings that end too early"),
        (HEAD + RESPONSE + ONE + tensor(13, [1], 0, 0, 3), "strings that end too early"),
        (HEAD + RESPONSE + ONE + tensor(11, [1], 0, 0, 4, b"\xff"), "utf-8"),
        (HEAD + struct.pack("<I", 0) + text(b"[1]"), "parameters that are no object"),
        (HEAD + struct.pack("<I", 0) + text(b'{"a": []}'), "a parameter of type list"),
        (HEAD + struct.pack("<I", 0) + text(b"["), "Expecting value"),
        (HEAD + struct.pack("<I", 0) + text(b"[" * 100000), "while decoding a JSON array"),
        (
            HEAD + struct.pack("<I", 1) + text(b"") + text(b"told") + struct.pack("<I", 9),
            "an error of code 9",
        ),
        (HEAD + struct.pack("<I", 1) + text(b"") + struct.pack("<I", 2**31), "ends too early"),
    ],
)
def test_a_result_that_cannot_be(body: bytes, reason: str) -> None:
    pair = Pair(1 << 18)
    batch = pair.begin(pair.request(IN=np.zeros(1, np.float32)))
    data = struct.pack("<I", 4) + b"four" + bytes(100)  # where its tensors would be
    at = pair.layout.outputs
    size = (len(body) + 63) // 64 * 64
    pair.shared.write(at, body.ljust(size, b"\0") + data[:64])
    entry = struct.pack("<IIQQQ", 16, len(body), 1, at, size + 64)
    pair.shared.write(pair.layout.done + 256, entry)
    pair.shared.write(pair.layout.done, struct.pack("<Q", 1))
    assert not pair.server.drain()
    assert len(pair.violations) == 1 and reason in pair.violations[0]
    assert pair.server.end() == ([batch], []) and not pair.answers.got
    pair.close()
    assert issubclass(Violation, Exception)


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (kinds.REPORT, struct.pack("<IQQ", 4, 1, 1), "a response whose outcome is 4"),
        (kinds.REPORT, struct.pack("<IQ", 0, 1), "ends too early"),
        (kinds.ACTIVITY, struct.pack("<QI", 1, 9), "ends too early"),
        (kinds.STATED, struct.pack("<IQI", 1, 1, 2), "a request whose outcome is 2"),
        (kinds.STATED, struct.pack("<IQIQ", 1, 1, 0, 5), "ends too early"),
        (kinds.STATED, struct.pack("<I", 2**31), "ends too early"),
        (kinds.STATED, struct.pack("<II", 0, 2**31), "ends too early"),
        (kinds.STATED, struct.pack("<IIQ", 0, 1, 5), "ends too early"),
    ],
)
def test_a_report_that_cannot_be(kind: int, body: bytes, reason: str) -> None:
    pair = Pair(1 << 18)
    at = pair.layout.outputs
    pair.shared.write(at, body.ljust(64, b"\0"))
    entry = struct.pack("<IIQQQ", kind, len(body), 0, at, 64)
    pair.shared.write(pair.layout.done + 256, entry)
    pair.shared.write(pair.layout.done, struct.pack("<Q", 1))
    assert not pair.server.drain()
    assert len(pair.violations) == 1 and reason in pair.violations[0]
    pair.close()
