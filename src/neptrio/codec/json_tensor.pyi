# The types of cext/codec/json_tensor.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable

from typing_extensions import Buffer

from neptrio.codec.json_reader import Stop
from neptrio.request.infer_request import Tensor

def tensor_json(t: Tensor, stop: Stop | None = None) -> bytes: ...
def tensor_of(
    name: str,
    dtype: int,
    shape: tuple[int, ...],
    data: Buffer,
    large: bool = False,
    reserve: Callable[[int], None] | None = None,
) -> Tensor: ...
