# The types of cext/codec/proto_response.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.request.infer_request import InferResponse

def encode_response(response: InferResponse, streamed: bool = False, final: bool = True) -> list[Any]: ...
