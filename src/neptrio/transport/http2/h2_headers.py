"""Headers for the session that uses h2: what requests have, and the encoder of answers.

A peer's SETTINGS say how large the table of headers may be that both sides keep. An encoder that takes a
new size must announce it in the next headers, or both tables differ from then on and the peer cannot read any more
headers. hpack's encoder forgets to announce a change if SETTINGS with the same size come again before the next headers.
So it is not told of a size that it has already.
"""

from __future__ import annotations

import hpack

from neptrio.transport.http2 import limits as lim

USUAL_HEADERS = (b"content-type", b"te", b"user-agent")
NEEDED = {b":method", b":scheme", b":path"}
PSEUDO = NEEDED | {b":authority"}
HOP_BY_HOP = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")


def malformed(headers: list[tuple[bytes, bytes]]) -> bool:
    """True for headers that RFC 9113 (8.2, 8.3) treats as a stream error; h2 would end the whole connection."""
    names = [name for name, _ in headers]
    pseudo = [name for name in names if name[:1] == b":"]
    return (
        names[: len(pseudo)] != pseudo
        or len(set(pseudo)) < len(pseudo)
        or not NEEDED <= set(pseudo) <= PSEUDO
        or any(not name or name != name.lower() or name in HOP_BY_HOP for name in names)
        or any(b"\0" in value or b"\n" in value for _, value in headers)
        or any(name == b"te" and value != b"trailers" for name, value in headers)
    )


class HeaderBlock:
    """A request's headers, with the interface of the nghttp2 session's."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = headers
        self.size = sum(
            len(name) + len(value) + 32 for name, value in headers
        )  # as RFC 9113 counts it (6.5.2)
        self.get = dict(reversed(headers)).get  # the value of the first header of a name, or None
        self.has_timeout = self.get(b"grpc-timeout") is not None
        self.has_custom = any(
            name not in USUAL_HEADERS and not name.startswith((b":", b"grpc-")) for name, _ in headers
        )

    def __call__(self) -> list[tuple[bytes, bytes]]:
        return self._headers

    def plain_rest(self) -> None:
        """No request is plain: what is faster about those would be lost in h2."""

    @property
    def problem(self) -> int:
        """Why this is no gRPC request."""
        if len(self._headers) > lim.MAX_HEADERS or self.size > lim.MAX_HEADER_LIST:
            return lim.HEADERS_TOO_LARGE
        if self.get(b":method") != b"POST":
            return lim.METHOD
        content_type = (self.get(b"content-type") or b"").partition(b";")[0]
        if content_type not in (b"application/grpc", b"application/grpc+proto"):
            return lim.CONTENT_TYPE
        return lim.FINE if self.get(b"te") == b"trailers" else lim.TE


class HeaderEncoder(hpack.Encoder):
    """hpack's encoder, which announces every change of its table's size."""

    @property
    def header_table_size(self) -> int:
        """Bytes of the table of headers, as the peer's SETTINGS say."""
        return int(self.header_table.maxsize)

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        if value != self.header_table.maxsize:
            self.header_table.maxsize = value
            self.table_size_changes.append(value)
