# The types of cext/codec/json_response.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.codec.json_reader import Stop
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor

def encode_response(
    request: InferRequest,
    response: InferResponse,
    binary_default: bool,
    later: bool = False,
    stop: Stop | None = None,
) -> tuple[bytes, list[Tensor] | None, int] | None: ...
