# The types of cext/observe/timing.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.request.infer_request import InferRequest

WISH: str
HEADER: bytes
NAMES: dict[str, str]

def wish(value: bytes) -> bool: ...
def timing_headers(request: InferRequest) -> list[tuple[bytes, bytes]]: ...
