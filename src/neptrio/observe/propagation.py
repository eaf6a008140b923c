"""Reads what a request's headers or gRPC metadata say about tracing: a W3C trace context, a forced trace.

Sources: W3C Trace Context (traceparent, tracestate); `neptrio-trace` is this server's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMES = (b"traceparent", b"tracestate", b"neptrio-trace")
SAMPLED = 1
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Asked:
    """The headers of one request that concern tracing.

    A traceparent that is malformed or present twice counts as absent, and so does its tracestate.
    """

    __slots__ = ("force", "sampled", "span_id", "trace_id", "tracestate")

    def __init__(self, found: dict[bytes, list[bytes]]) -> None:
        self.force = b",".join(found.get(b"neptrio-trace", ())).decode("latin-1").strip()
        self.trace_id = self.span_id = 0  # 0: there is no trace context
        self.sampled = False
        self.tracestate = ""
        parents = found.get(b"traceparent", ())
        match = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
        if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
            return
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        if trace_id and span_id:
            self.trace_id, self.span_id = trace_id, span_id
            self.sampled = bool(int(match[4], 16) & SAMPLED)
            self.tracestate = b",".join(found.get(b"tracestate", ())).decode("latin-1")

    def as_sent(self) -> dict[str, str]:
        """The headers from which asked() makes an object like this one."""
        made = {"neptrio-trace": self.force} if self.force else {}
        if self.trace_id:
            made["traceparent"] = f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"
            if self.tracestate:
                made["tracestate"] = self.tracestate
        return made


def asked(headers: Iterable[tuple[bytes, bytes]]) -> Asked | None:
    """The headers that concern tracing, None when there are none."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if len(name) in (10, 11, 13) and (lower := name.lower()) in NAMES:
            found.setdefault(lower, []).append(value)
    return Asked(found) if found else None


def traceparent(trace_id: int, span_id: int) -> str:
    """The traceparent header for a sampled span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"
