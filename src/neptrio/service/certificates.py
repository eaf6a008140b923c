"""What the server knows of a client's certificate: its subject, for the audit log, and its names, for --auth-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# kind of name in the file of --auth-config -> how the ssl module calls it among the alternative names
ALTERNATIVE = {"dns": "DNS", "uri": "URI", "email": "email", "ip": "IP Address"}
KINDS = ("common_name", *ALTERNATIVE)


@dataclass(frozen=True, eq=False)
class Certificate:
    """A certificate that TLS has verified. `names` maps each kind (KINDS) to the names of that kind that it has."""

    subject: str
    names: Mapping[str, tuple[str, ...]]


def of_peer(found: Mapping[str, Any] | None) -> Certificate | None:
    """The certificate that SSLSocket.getpeercert() or SSLObject.getpeercert() describes; None if there is none."""
    if not found:
        return None
    subject = [pair for group in found.get("subject", ()) for pair in group]
    alternative = found.get("subjectAltName", ())
    names = {kind: tuple(name for of, name in alternative if of == own) for kind, own in ALTERNATIVE.items()}
    names["common_name"] = tuple(value for key, value in subject if key == "commonName")
    return Certificate(", ".join(f"{key}={value}" for key, value in subject), names)
