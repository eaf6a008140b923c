"""The text of a gRPC status on the wire."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from neptrio.transport.grpc.message_stream import percent_encode


@pytest.mark.parametrize("text", ["got [4]. ", " x", " ", "  ", "a b", "100 % ü\n", "", " \u00a0 "])
def test_a_message_is_a_valid_header_value_and_comes_back(text: str) -> None:
    wire = percent_encode(text)
    assert wire.strip(b" \t") == wire and all(0x20 <= byte <= 0x7E for byte in wire)
    assert unquote(wire.decode()) == text
