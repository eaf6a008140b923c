# The types of cext/transport/rest/head.pyx, which says what everything does; written by tools/make_stubs.py.

class HeadTooLarge(Exception): ...

class RequestHead:
    url: bytes
    headers: list[tuple[bytes, bytes]]
    header_length: bytes | None
    content_encoding: bytes | None
    accept_encoding: bytes | None
    expect: bytes | None
    host: bytes | None
    hosts: int
    origin: bytes | None
    fetch_site: bytes | None
    timing: bytes | None
    in_message: bool
    head_complete: bool
    chunked: bool
    content_length: int
    receive_start: int
    head_limit: int
    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
