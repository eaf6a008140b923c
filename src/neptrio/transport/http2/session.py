"""Chooses the HTTP/2 session that serves gRPC: libnghttp2's where it was built, else h2's.

The environment variable NEPTRIO_HTTP2_SESSION (`nghttp2` or `h2`) forces one; tests use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from neptrio.transport.http2.session_core import Http2Session as Http2Session

if TYPE_CHECKING:
    from neptrio.transport.http2.stream import Stream

CHOICES = {"nghttp2": "neptrio.transport.http2.nghttp2_session", "h2": "neptrio.transport.http2.h2_session"}


class Headers(Protocol):
    """A request's headers, which are decoded only when they are read."""

    @property
    def problem(self) -> int:
        """Why this is no gRPC request (limits.PROBLEMS), 0 when it is one."""

    @property
    def has_timeout(self) -> bool:
        """True when there is a grpc-timeout."""

    @property
    def has_custom(self) -> bool:
        """True when there is metadata besides what every gRPC client sends."""

    def plain_rest(self) -> tuple[bytes, int, int] | None:
        """Host and lengths of a plain REST request; None for any other (cext/transport/http2/nghttp2_headers)."""

    def __call__(self) -> list[tuple[bytes, bytes]]:
        """All headers, pseudo-headers included."""

    def get(self, name: bytes, /) -> bytes | None:
        """The value of the first header of that name, or None."""


# (session, stream id, path, headers) -> the object that handles the call
OpenStream = Callable[["Http2Session", int, bytes, Headers], "Stream"]


def implementation() -> str:
    """The name of the session in use, for the start-up text. Raises ValueError for an unknown forced choice."""
    forced = os.environ.get("NEPTRIO_HTTP2_SESSION")
    if forced:
        if forced not in CHOICES:
            raise ValueError(f"NEPTRIO_HTTP2_SESSION is '{forced}', expected nghttp2 or h2")
        return forced
    try:
        import_module(CHOICES["nghttp2"])
    except ImportError:
        return "h2"
    return "nghttp2"


def session_class() -> Callable[..., Http2Session]:
    """The class of server-side sessions: (open_stream, flood_budget, totals=...) makes one."""
    made: Callable[..., Http2Session] = import_module(CHOICES[implementation()]).Session
    return made
