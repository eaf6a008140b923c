"""Large bodies that a worker reads come through a bounded connection, those that are used as they are do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.transport.http1 import input
from neptrio.transport.http1.input import BOUNDED_BYTES, Http1Input

LARGE, SMALL = BOUNDED_BYTES + 1, BOUNDED_BYTES


def test_which_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(input, "bound", lambda sock, bounded: asked.append(bounded))
    connection: Any = SimpleNamespace(sock=None, _bounded=False)  # the part that decides
    for content_length, header_length, encoding, expected in (
        (SMALL, None, None, []),  # JSON
        (LARGE, b"100", None, []),  # binary
        (LARGE, None, None, [True]),
        (LARGE, None, None, [True]),  # it is bounded already
        (LARGE, b"100", b"gzip", [True]),
        (LARGE, b"100", None, [True, False]),
        (LARGE, b"100", b"gzip", [True, False, True]),
        (SMALL, b"100", b"gzip", [True, False, True, False]),
    ):
        connection.content_length = content_length
        connection.header_length = header_length
        connection.content_encoding = encoding
        Http1Input._bound_connection(connection)
        assert asked == expected
