"""Limits on what one HTTP/2 connection may demand, shared by both sessions.

The problem: HTTP/2 lets a peer make a server work with frames that cost the peer next to nothing: streams opened and
reset at once, PINGs and SETTINGS that need an answer, headers without end, header tables that expand a byte to
kilobytes. The choice: such frames are paid from a budget. Work done for the peer (DATA sent, calls ended) and time
refill it, so a useful client never notices it, and one that only makes noise is disconnected with GOAWAY
ENHANCE_YOUR_CALM. What it held is freed with its connection; other connections are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEADERS = 128
MAX_HEADER_LIST = 64 << 10  # bytes; above this the call is refused
HEADER_BOMB = 1 << 20  # bytes after decoding; above this the connection is ended

NO_ERROR = 0
PROTOCOL_ERROR = 1
INTERNAL_ERROR = 2
FRAME_SIZE_ERROR = 6
CANCEL = 8
ENHANCE_YOUR_CALM = 11

FINE, METHOD, CONTENT_TYPE, TE, HEADERS_TOO_LARGE = range(5)

BUDGET = 4096.0  # twice as many as streams may be open: more than a client's largest burst of cancellations
REFILL_PER_S = 100.0
PING_COST = 4


@dataclass(frozen=True)
class SessionLimits:
    """What a session announces in its SETTINGS, and the window of its connection, in bytes. It takes twice the size of a
    frame without a whole frame: more are headers without end."""

    streams: int
    stream_window: int
    connection_window: int
    frame_size: int


# of gRPC: one round trip per 4 MiB of tensor
GRPC = SessionLimits(2048, 4 << 20, 64 << 20, 1 << 20)
# of REST, whose clients send smaller bodies, and each of whose verbs is a task
REST = SessionLimits(256, 1 << 20, 16 << 20, 256 << 10)


@dataclass(frozen=True)
class PingPolicy:
    """When a client sends too many PINGs (the --grpc-http2-* flags; 0 strikes: never)."""

    min_interval_ns: int = 300_000 * 10**6
    max_strikes: int = 2


class FloodBudget:
    """What one connection may still ask of us for nothing. Time is an argument: refill(now)."""

    def __init__(self, policy: PingPolicy | None = None) -> None:
        self.policy = policy or PingPolicy()
        self.budget = BUDGET
        self.strikes = 0
        self._now = 0
        self._last_ping = 0

    def refill(self, now_ns: int, work: int) -> None:
        """Adds to the budget for the time since the last call and for the `work` done for the peer in it."""
        if now_ns > self._now:
            gained = work + ((now_ns - self._now) * REFILL_PER_S / 1e9 if self._now else 0.0)
            self._now = now_ns
        else:
            gained = work
        self.budget = min(BUDGET, self.budget + gained)

    def spend(self, cost: int) -> bool:
        """Takes `cost` from the budget; False when it was not enough."""
        self.budget -= cost
        return self.budget >= 0

    def pinged(self, open_streams: int) -> bool:
        """Counts a PING from the peer. Returns False when there were too many.

        A PING too soon after the last one is a strike. Sending headers to the peer clears all strikes, so a client that
        measures its bandwidth with PINGs while it is served has none.
        """
        too_soon = self._last_ping and self._now - self._last_ping < self.policy.min_interval_ns
        self._last_ping = self._now
        if too_soon and not open_streams and self.policy.max_strikes:
            self.strikes += 1
            if self.strikes > self.policy.max_strikes:
                return False
        return self.spend(PING_COST)
