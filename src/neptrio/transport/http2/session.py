"""Chooses the HTTP/2 session that serves gRPC: libnghttp2's where it was built, else h2's.

The environment variable NEPTRIO_HTTP2_SESSION (`nghttp2` or `h2`) forces one; tests use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from neptrio.transport.http2.stream import Account, Stream

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


class Http2Session(Protocol):
    """One HTTP/2 connection's state, without I/O; the rules are in cext/transport/http2/nghttp2_session.pyx."""

    @property
    def account(self) -> Account:
        """Counts the bytes that its streams hold."""

    @property
    def streams(self) -> Mapping[int, Stream]:
        """The open streams by id."""

    @property
    def last_stream(self) -> int:
        """The highest stream id that the client has opened, 0 before the first."""

    @property
    def dead(self) -> bool:
        """True when the peer broke the protocol or terminate() was called: send the output and close."""

    @property
    def failure(self) -> str | None:
        """Why it is dead, or None."""

    @property
    def draining(self) -> bool: ...

    @property
    def pings_acked(self) -> int:
        """How many of our PINGs the peer has answered."""

    @property
    def partial(self) -> bool:
        """True in the middle of a frame or of a request's headers."""

    @property
    def begun(self) -> int:
        """How many frames have begun."""

    @property
    def wants_output(self) -> bool: ...

    @property
    def finished(self) -> bool:
        """True when neither side has anything more to send."""

    def receive(self, data: Any, now_ns: int = 0, /) -> None: ...

    def data_to_send(self) -> list[Any]: ...

    def output_ready(self, stream: Any, /) -> None: ...

    def resume_input(self, stream: Any, /) -> None: ...

    def reset(self, stream: Any, code: int = 8, /) -> None: ...

    def terminate(self, code: int, /) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def ping(self) -> None: ...

    def start_drain(self) -> None: ...

    def finish_drain(self) -> None: ...

    def connection_lost(self) -> None: ...


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
    """The class of server-side sessions: (open_stream, nuisance, totals=...) makes one."""
    made: Callable[..., Http2Session] = import_module(CHOICES[implementation()]).Session
    return made
