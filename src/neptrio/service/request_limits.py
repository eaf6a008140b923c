"""How many requests one client address may make: per second, and at once.

Rules:
 1. Off unless a limit is set: then a front asks problem() for every request that is no health probe. Those of one
    address over all its connections, REST and gRPC, count together; of IPv6 a /64 is one address.
 2. Every connection joins with a function that says how many requests it has under way, so that none has to be
    counted off when it ends, however it ends.
 3. The rate is a bucket that holds one second of requests: who was silent may send so many at once.
 4. A request that makes the model infer more than once (choices and texts of OpenAI's API) counts as so many: further()
    is asked for the others, and a rate goes into debt for them, so that a request is refused for how many it makes at
    once only, not for more than a second's worth.
 5. A client cannot have its bucket forgotten: only full ones are, or the oldest of MOST_BUCKETS.
"""

from __future__ import annotations

from collections.abc import Callable

from neptrio.errors import TooManyRequests
from neptrio.service.connections import client_of

MOST_BUCKETS = 8192
NS = 10**9


class Bucket:
    """How many requests may be made now: filled at a rate, up to one second's worth, and full at first."""

    __slots__ = ("_left", "_then")

    def __init__(self) -> None:
        self._left = float("inf")
        self._then = 0

    def spend(self, per_second: int, now_ns: int) -> bool:
        """Takes one request out; False if there is none."""
        most = float(per_second)
        self._left = min(most, self._left + (now_ns - self._then) * most / NS)
        self._then = now_ns
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def owe(self, count: int) -> None:
        """Takes out what a request that was let in makes besides."""
        self._left -= count


class RequestLimits:
    """The limits and who is near them. Trio thread only; the time is an argument."""

    def __init__(self, per_second: int, at_once: int) -> None:
        """0: no limit of that kind."""
        self._per_second = per_second
        self._at_once = at_once
        self.clients: dict[str, set[Callable[[], int]]] = {}
        self.buckets: dict[str, Bucket] = {}  # the one that was used last is the last

    @property
    def on(self) -> bool:
        """Whether there is any limit."""
        return bool(self._per_second or self._at_once)

    def join(self, address: str, open_requests: Callable[[], int]) -> None:
        """A connection of `address` began; leave() is owed."""
        self.clients.setdefault(client_of(address), set()).add(open_requests)

    def leave(self, address: str, open_requests: Callable[[], int]) -> None:
        """The connection has ended."""
        client = client_of(address)
        left = self.clients[client]
        left.discard(open_requests)
        if not left:
            del self.clients[client]

    def problem(self, address: str, now_ns: int, itself: int = 0) -> TooManyRequests | None:
        """Why a request of `address` is refused now, None when it is not; it is counted then.

        `itself`: 1 where the connection does not count the request yet.
        """
        client = client_of(address)
        if self._at_once:
            open_now = sum(count() for count in self.clients.get(client, ())) + itself
            if open_now > self._at_once:
                return TooManyRequests(
                    f"this client address has {self._at_once} requests under way, which is what it may have "
                    "(--max-concurrent-requests-per-address); send the request again when others are answered"
                )
        if self._per_second and not self._spend(client, now_ns):
            return TooManyRequests(
                f"this client address may make {self._per_second} requests per second "
                "(--max-requests-per-second-per-address); send the request again in a second"
            )
        return None

    def further(self, address: str, count: int) -> TooManyRequests | None:
        """Why a request of `address` that was let in may not make `count` more at once, None when it may.

        They are counted for the rate; for what is under way whoever makes them joins.
        """
        client = client_of(address)
        if self._at_once:
            open_now = sum(counts() for counts in self.clients.get(client, ()))
            if open_now + count > self._at_once:
                return TooManyRequests(
                    f"this client address would have {open_now + count} requests under way, of {self._at_once} that it "
                    "may have (--max-concurrent-requests-per-address): each choice and each text counts as one"
                )
        if self._per_second and client in self.buckets:
            self.buckets[client].owe(count)
        return None

    def _spend(self, client: str, now_ns: int) -> bool:
        bucket = self.buckets.pop(client, None) or Bucket()
        if len(self.buckets) >= MOST_BUCKETS:
            del self.buckets[next(iter(self.buckets))]
        self.buckets[client] = bucket
        return bucket.spend(self._per_second, now_ns)
