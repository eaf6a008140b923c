# The types of cext/codec/json_response.pyx, which says what everything does.

from neptrio.request.infer_request import InferRequest, InferResponse, Tensor

def encode_response(
    request: InferRequest, response: InferResponse, binary_default: bool
) -> tuple[bytes, list[Tensor] | None, int]: ...
