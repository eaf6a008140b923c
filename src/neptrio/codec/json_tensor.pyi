# The types of cext/codec/json_tensor.pyx, which says what everything does.

from typing_extensions import Buffer

from neptrio.request.infer_request import Tensor

def tensor_json(t: Tensor) -> bytes: ...
def tensor_of(name: str, dtype: int, shape: tuple[int, ...], data: Buffer) -> Tensor: ...
