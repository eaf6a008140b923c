"""Which HTTP/2 session serves gRPC: libnghttp2 where it was built, h2 otherwise.

The environment variable NEPTRIO_HTTP2_SESSION (`nghttp2` or `h2`) forces one, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from neptrio.transport.http2.limits import Nuisance
    from neptrio.transport.http2.stream import Account, GrpcStream

CHOICES = {"nghttp2": "neptrio.transport.http2.nghttp2_session", "h2": "neptrio.transport.http2.h2_session"}


class Headers(Protocol):
    """A request's headers, decoded as far as somebody asks for them."""

    @property
    def problem(self) -> int:
        """Why this is no gRPC request (limits.PROBLEMS), 0 when it is one."""

    @property
    def has_timeout(self) -> bool:
        """There is a grpc-timeout."""

    @property
    def has_custom(self) -> bool:
        """There is metadata beyond what every gRPC client sends."""

    def __call__(self) -> list[tuple[bytes, bytes]]:
        """All of them, pseudo-headers included."""

    def get(self, name: bytes, /) -> bytes | None:
        """The first one of that name."""


# (session, stream id, path, headers) -> the object that takes the call
OpenStream = Callable[["Http2Session", int, bytes, Headers], "GrpcStream"]


class Http2Session(Protocol):
    """One connection's HTTP/2 state, sans I/O; cext/transport/http2/nghttp2_session.pyx tells the contract."""

    @property
    def account(self) -> Account:
        """What its streams hold, together."""

    @property
    def streams(self) -> Mapping[int, GrpcStream]:
        """The open ones."""

    @property
    def last_stream(self) -> int:
        """The highest stream that the client has opened, 0 before the first."""

    @property
    def dead(self) -> bool:
        """The peer broke the protocol, or terminate() was called: flush and close."""

    @property
    def failure(self) -> str | None:
        """Why it is dead."""

    @property
    def draining(self) -> bool: ...

    @property
    def pings_acked(self) -> int:
        """Our PINGs that the peer has answered."""

    @property
    def wants_output(self) -> bool: ...

    @property
    def finished(self) -> bool:
        """Both sides have said all they had to say."""

    def receive(self, data: Any, now_ns: int = 0, /) -> None: ...

    def data_to_send(self) -> list[Any]: ...

    def output_ready(self, stream: Any, /) -> None: ...

    def resume_input(self, stream: Any, /) -> None: ...

    def reset(self, stream: Any, /) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def ping(self) -> None: ...

    def start_drain(self) -> None: ...

    def finish_drain(self) -> None: ...

    def connection_lost(self) -> None: ...


def implementation() -> str:
    """The session in use, for the start-up log. Raises ValueError for an unknown forced choice."""
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


def session_class() -> Callable[[OpenStream, Nuisance], Http2Session]:
    """The class of server-side sessions."""
    made: Callable[[OpenStream, Nuisance], Http2Session] = import_module(CHOICES[implementation()]).Session
    return made
