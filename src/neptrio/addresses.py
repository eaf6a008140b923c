"""Addresses that sockets listen on."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine can reach what listens on `address`: an IP address or `localhost`."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
