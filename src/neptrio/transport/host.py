"""The Host header: one name for the server a request is for, in a form that has one reading.

A request with no Host, two of them, or one that is no host and port is read differently by different
servers and proxies, and whoever sends it can have one of them take it for another's request. RFC 9112 (3.2)
wants such requests refused; HTTP/1.0 knows no Host and may come without.
"""

from __future__ import annotations

import re

from neptrio.errors import InvalidArgument

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?\Z")
SHOWN = 60  # characters of a wrong Host in the answer


def host_problem(host: bytes | None, count: int, version: str) -> InvalidArgument | None:
    """What is wrong with the `count` Host headers of a request, of which `host` is the last; None: nothing."""
    if count > 1:
        return InvalidArgument(f"expected one Host header, got {count}")
    if host is None:
        return None if version == "1.0" else InvalidArgument("expected a Host header, got none")
    if _HOST.match(host) is None:
        shown = host[:SHOWN].decode("latin-1")
        return InvalidArgument(f"expected Host: NAME or Host: NAME:PORT, got '{shown}'")
    return None
