"""Which HTTP/2 session serves gRPC: libnghttp2 where it was built, h2 otherwise."""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    _nghttp2: Any = import_module("neptrio._cext.http2_nghttp2")
except ImportError:
    _nghttp2 = None


def implementation() -> str:
    """The session in use, for the start-up log."""
    return "nghttp2" if _nghttp2 is not None else "h2"


def new_session(open_stream: Any) -> Any:
    """A server-side session; see cext/http2_nghttp2.pyx for its contract."""
    if _nghttp2 is None:
        raise RuntimeError("the h2 session is missing")
    return _nghttp2.Session(open_stream)
