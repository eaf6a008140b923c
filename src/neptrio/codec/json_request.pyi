# The types of cext/codec/json_request.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

from neptrio.codec.json_reader import Stop
from neptrio.codec.known_texts import KnownTexts
from neptrio.codec.shared_memory import SharedMemory
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import InferRequest

known_texts: KnownTexts

def region_and_classes() -> InvalidArgument: ...
def no_shared_memory() -> InvalidArgument: ...
def add_parameter(r: InferRequest, key: str, value: Any) -> None: ...
def decode_request(
    r: InferRequest,
    body: Buffer,
    header_length: int | None = None,
    shared_memory: SharedMemory | None = None,
    stop: Stop | None = None,
    binary: Buffer | None = None,
    reserve: Callable[[int], None] | None = None,
) -> bool: ...
