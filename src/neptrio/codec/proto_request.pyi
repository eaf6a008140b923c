# The types of cext/codec/proto_request.pyx, which says what everything does.

from typing_extensions import Buffer

from neptrio.codec.shared_memory import SharedMemory
from neptrio.request.infer_request import InferRequest

def decode_request(r: InferRequest, message: Buffer, shared_memory: SharedMemory | None = None) -> None: ...
