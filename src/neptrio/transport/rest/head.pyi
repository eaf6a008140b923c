# The types of cext/transport/rest/head.pyx, which says what everything does; written by tools/make_stubs.py.

class HeadTooLarge(Exception): ...

class RequestHead:
    url: bytes
    headers: list[tuple[bytes, bytes]]
    hosts: int
    chunked: bool
    content_length: int
    receive_start: int
    head_limit: int
    def clear(self) -> int: ...
    def add(self, name: bytes, value: bytes) -> int: ...
    def get(self, name: bytes) -> bytes | None: ...
