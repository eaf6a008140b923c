"""Hostile traffic over HTTP/2, for any port that speaks it: frames, floods, and checks of how it ends."""

from __future__ import annotations

import struct

from tests.support.raw_http2 import RawClient, frame

PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, ENHANCE_YOUR_CALM = 1, 2, 3, 6, 11
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4

CANCEL = struct.pack(">I", 8)
# a header of 4,000 bytes that enters the HPACK table, so that one byte can stand for it from then on
TABLE_ENTRY = b"\x40\x01x\x7f" + b"\xa1\x1e" + b"y" * 4000
NAMED = b"\xbe"

PINGS = frame(PING, 0, 0, b"12345678")
CHANGED_SETTINGS = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535))
EMPTY_SETTINGS = frame(SETTINGS, 0, 0)
WINDOW_UPDATES = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))

# each is answered with GOAWAY and an error
GARBAGE = [
    frame(DATA, 0, 0, b"x"),
    frame(HEADERS, END_HEADERS, 2, b"\x82"),
    frame(HEADERS, END_HEADERS, 0, b"\x82"),
    frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"),
    frame(HEADERS, END_HEADERS, 1, b"\xbf"),
    frame(CONTINUATION, END_HEADERS, 1, b"\x82"),
    frame(SETTINGS, 0, 0, b"x"),
    frame(SETTINGS, 0, 1, b""),
    frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)),
    frame(PING, 0, 0, b"x"),
    frame(RST_STREAM, 0, 0, bytes(4)),
    frame(RST_STREAM, 0, 9, bytes(4)),
    frame(WINDOW_UPDATE, 0, 0, b"x"),
    frame(5, END_HEADERS, 1, bytes(4)),
    b"\xff\xff\xff\0\0\0\0\0\0",
    bytes(range(256)) * 20,
]


def rapid_reset(block: bytes, body: bytes | None = None) -> bytes:
    """Ten thousand streams that are opened, with or without a body, and reset at once.

    `block` must come from an HPACK encoder without a dynamic table, because every stream sends the same bytes.
    """
    return b"".join(
        frame(HEADERS, END_HEADERS, i, block)
        + (b"" if body is None else frame(DATA, END_STREAM, i, body))
        + frame(RST_STREAM, 0, i, CANCEL)
        for i in range(1, 20001, 2)
    )


def priorities() -> bytes:
    """Ten thousand PRIORITY frames, each for a stream that is never opened."""
    return b"".join(frame(PRIORITY, 0, i, b"\0\0\0\0\1") for i in range(1, 20001, 2))


def window(stream: int, more: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def pour(client: RawClient, data: bytes) -> None:
    """Sends as much of `data` as the server takes before it closes."""
    try:
        client.send(data)
    except (BrokenPipeError, ConnectionResetError):
        pass


def sent_away(client: RawClient, *codes: int) -> None:
    """Checks that the server sends GOAWAY with one of the codes and closes the connection."""
    client.until_closed()
    assert client.goaway is not None and client.goaway.error_code in codes, client.goaway


def refused_window(client: RawClient) -> None:
    """Checks that the server ends stream 1, or the connection, because a window became too large."""
    client.until(lambda: client.replies[1].reset is not None or client.goaway is not None, "an error")
    assert FLOW_CONTROL_ERROR in (client.replies[1].reset, client.goaway and client.goaway.error_code)


def refused_garbage(client: RawClient) -> None:
    """Checks that the server sends GOAWAY with an error and closes the connection."""
    client.until_closed()
    assert client.goaway is not None and client.goaway.error_code != 0
