"""Addresses that sockets listen on, and those of servers to ask."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, quote, urlsplit

# servers of this protocol match a name in a path as it is sent, without percent-decoding
AS_THEY_ARE = "".join(letter for letter in map(chr, range(0x21, 0x7F)) if letter not in "/?#")


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine can reach what listens on `address`: an IP address or `localhost`."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def parts_of(url: str) -> SplitResult:
    """The parts of HOST:PORT or SCHEME://HOST:PORT. Raises ValueError where there is no host, or none that could be looked up, or
    where the port is no number."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    if not parts.hostname:
        raise ValueError("no host")
    parts.hostname.encode("idna")  # as the system's resolver gets it
    _ = parts.port
    return parts


def model_in_path(name: str) -> str:
    """A model's name in a path: with nothing encoded that a path can hold."""
    return quote(name, safe=AS_THEY_ARE)
