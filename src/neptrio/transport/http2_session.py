"""Which HTTP/2 session serves gRPC: libnghttp2 where it was built, h2 otherwise.

The environment variable NEPTRIO_HTTP2_SESSION (`nghttp2` or `h2`) forces one, for tests.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

CHOICES = {"nghttp2": "neptrio._cext.http2_nghttp2", "h2": "neptrio.transport.http2_h2"}


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


def session_class() -> Any:
    """The class of server-side sessions; see cext/http2_nghttp2.pyx for its contract."""
    return import_module(CHOICES[implementation()]).Session
