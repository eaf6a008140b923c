"""Checks the Host header of a request: there must be one, and it must be a host and perhaps a port.

Servers and proxies disagree about requests without a Host, with two, or with a malformed one. An attacker can use that
to make a proxy and the server behind it treat a request as meant for different hosts. RFC 9112 (3.2) therefore asks
servers to refuse such requests. HTTP/1.0 has no Host header, so its requests may lack it.
"""

from __future__ import annotations

import re

from neptrio.errors import InvalidArgument

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?\Z")
SHOWN = 60  # characters of a wrong Host in the answer


def host_problem(host: bytes | None, count: int, version: str) -> InvalidArgument | None:
    """Why a request with `count` Host headers is refused, None if it is not. `host` is the last of these headers,
    `version` the HTTP version, like "1.1"."""
    if count > 1:
        return InvalidArgument(f"expected one Host header, got {count}")
    if host is None:
        return None if version == "1.0" else InvalidArgument("expected a Host header, got none")
    if _HOST.match(host) is None:
        shown = host[:SHOWN].decode("latin-1")
        return InvalidArgument(f"expected Host: NAME or Host: NAME:PORT, got '{shown}'")
    return None
