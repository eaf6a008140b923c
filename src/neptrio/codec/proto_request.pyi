# The types of cext/codec/proto_request.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable

from typing_extensions import Buffer

from neptrio.codec.json_reader import Stop
from neptrio.codec.known_texts import KnownTexts
from neptrio.codec.shared_memory import SharedMemory
from neptrio.request.infer_request import InferRequest

known_heads: KnownTexts

def decodes_slowly(message: Buffer) -> bool: ...
def decode_request(
    r: InferRequest,
    message: Buffer,
    shared_memory: SharedMemory | None = None,
    stop: Stop | None = None,
    reserve: Callable[[int], None] | None = None,
) -> None: ...
