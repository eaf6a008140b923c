"""A model's outputs as one block of bytes, as a compiled cache keeps them, and back.

The problem: what comes back was in the hands of another process, and perhaps on another machine. The choice: the block begins
with a code over the key and all that follows (keyed BLAKE2b). Where the code's key is this server's alone, only what it has
packed itself, for just this question, passes.

Rules:
 1. unpack() believes nothing: every number is checked against the bytes that there are, strings of BYTES tensors included.
 2. Data begins on a multiple of ALIGNED bytes of the block, so that tensors can be used where they are.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from hashlib import blake2b

from neptrio.datatypes import BYTES, ITEM_SIZE
from neptrio.request.infer_request import Tensor

CODE_BYTES = 32
ALIGNED = 64
MOST_TENSORS = 4096
MOST_DIMENSIONS = 64
MOST_ELEMENTS = 1 << 40
COUNT = struct.Struct("<I")
HEAD = struct.Struct("<HBBQ")  # bytes of the name, datatype, rank, bytes of the data
LENGTH = struct.Struct("<I")


class Unusable(ValueError):
    """A block that is not one that was packed for this key."""


def packed(outputs: Sequence[Tensor]) -> bytearray:
    """The block, without its code, which seal() adds. The tensors lie in the host's memory."""
    heads = bytearray(CODE_BYTES)
    heads += COUNT.pack(len(outputs))
    for tensor in outputs:
        name = tensor.name.encode()
        heads += HEAD.pack(len(name), tensor.dtype, len(tensor.shape), tensor.nbytes)
        heads += struct.pack(f"<{len(tensor.shape)}q", *tensor.shape)
        heads += name
    for tensor in outputs:
        heads += bytes(-len(heads) % ALIGNED)
        heads += memoryview(tensor)
    return heads


def packed_bytes(outputs: Sequence[Tensor]) -> int:
    """How large a block is at most."""
    return CODE_BYTES + sum(tensor.nbytes + 1024 + ALIGNED for tensor in outputs)


def seal(block: bytearray, key: bytes, secret: bytes) -> None:
    """Writes the block's code."""
    block[:CODE_BYTES] = _code(memoryview(block), key, secret)


def _code(block: memoryview, key: bytes, secret: bytes) -> bytes:
    code = blake2b(key, digest_size=CODE_BYTES, key=secret)
    code.update(block[CODE_BYTES:])
    return code.digest()


def unpack(block: bytearray, key: bytes, secret: bytes) -> list[Tensor]:
    """The tensors, over the block's memory. Raises Unusable."""
    view = memoryview(block)
    if len(view) < CODE_BYTES or not hmac.compare_digest(_code(view, key, secret), view[:CODE_BYTES]):
        raise Unusable("it is not what was stored")
    try:
        return _tensors(view)
    except (struct.error, UnicodeDecodeError) as error:
        raise Unusable(str(error)) from None


def _tensors(view: memoryview) -> list[Tensor]:
    (count,) = COUNT.unpack_from(view, CODE_BYTES)
    at = CODE_BYTES + COUNT.size
    if count > MOST_TENSORS:
        raise Unusable(f"it has {count} tensors")
    heads = []
    for _ in range(count):
        name_size, dtype, rank, nbytes = HEAD.unpack_from(view, at)
        at += HEAD.size
        if rank > MOST_DIMENSIONS or dtype not in ITEM_SIZE:
            raise Unusable(f"it has a tensor of {rank} dimensions and datatype {dtype}")
        shape = struct.unpack_from(f"<{rank}q", view, at)
        at += 8 * rank
        if name_size > len(view) - at:
            raise Unusable("it ends within a name")
        heads.append((str(view[at : at + name_size], "utf-8"), dtype, shape, nbytes))
        at += name_size
    made = []
    for name, dtype, shape, nbytes in heads:
        at += -at % ALIGNED
        if nbytes > len(view) - at:
            raise Unusable("it ends within a tensor")
        data = view[at : at + nbytes]
        _check(data, dtype, shape)
        made.append(Tensor(name, dtype, shape, data.toreadonly()))
        at += nbytes
    if at != len(view):
        raise Unusable("bytes are left over")
    return made


def _check(data: memoryview, dtype: int, shape: tuple[int, ...]) -> None:
    elements = 1
    for dimension in shape:
        if dimension < 0 or dimension > MOST_ELEMENTS:
            raise Unusable(f"it has a tensor of shape {list(shape)}")
        elements *= dimension
        if elements > MOST_ELEMENTS:
            raise Unusable(f"it has a tensor of shape {list(shape)}")
    if dtype != BYTES:
        if elements * ITEM_SIZE[dtype] != len(data):
            raise Unusable(f"it has a tensor of shape {list(shape)} in {len(data)} bytes")
        return
    at = found = 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        found += 1
    if at != len(data) or found != elements:
        raise Unusable(f"it has {found} strings where the shape is {list(shape)}")
