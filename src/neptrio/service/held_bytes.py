"""Bytes that requests and answers hold, over both fronts, and whether there is room for more.

The problem: each connection is bounded, and each request, but not their product: a few thousand connections that
each send one large body and do not read their answers hold more than the machine has. The choice: one budget for all
of it. Everybody who holds bytes can say how many; adding them up is left for moments when a large body is about to come.

Rules:
 1. A source is a function that says what its owner holds now: bodies from when they were let in until they are answered (what
    has not come is counted, or others would be given its room), what they were inflated to, answers that clients have not read,
    headers of open HTTP/2 streams and of HTTP/1.1 requests that are not answered, and what messages take in queues beside their bytes.
 2. A total is good for GOOD_NS; what was let in and answered since is added to it. It is made anew only where something is to
    be let in.
 3. Every road has exactly one place that counts: our own HTTP/1.1 connection and the gRPC connection count their own
    (held_bytes of each), whatever calls the REST app otherwise goes through transport.rest.guards.Bounded. A request is
    held until it is answered, an answer until its client, or the kernel, has taken it. While more is held than may be,
    new requests are refused, however small they are, but for probes. A new road gets a line in
    tests/transport/test_held_bytes.py.
 4. A body that does not fit is refused before it is read. Small requests are not asked for: a few KiB each,
    they are bounded by connections, and looking would cost them more than it saves. Messages that wait in a stream are asked
    for by the hundred.
"""

from __future__ import annotations

from collections.abc import Callable

from neptrio.errors import Overloaded, raise_it
from neptrio.observe import memory_limit
from neptrio.request.infer_request import monotonic_ns
from neptrio.service.held_core import HeldCore

GOOD_NS = 10_000_000
LEAST = 1 << 30


def default_limit() -> int:
    """Half of the container's memory, or of the machine's, then never less than a GiB."""
    return memory_limit.share(2, at_least=LEAST)


class HeldBytes(HeldCore):
    """The budget. Trio thread only."""

    def __init__(self, limit: int = 0) -> None:
        """`limit` 0: default_limit()."""
        self.limit = limit or default_limit()
        self._kept = 0
        self._sources: list[Callable[[], int]] = [lambda: self._kept]
        self._total = 0
        self._looked_ns = -2 * GOOD_NS
        self._seen, self._seen_ns = 0, -2 * GOOD_NS  # the same for those whose bytes are counted

    def add(self, source: Callable[[], int]) -> None:
        """Somebody who holds bytes, until the end of the server."""
        self._sources.append(source)

    def count(self) -> int:
        """What is held now, for whoever wants to know it; what may be let in does not change."""
        total = sum(source() for source in self._sources)
        self.full = total > self.limit
        return total

    def look(self, now_ns: int | None = None) -> int:
        """Makes the total anew."""
        self._looked_ns = monotonic_ns() if now_ns is None else now_ns
        self._total = self.count()
        return self._total

    def take(self, size: int, now_ns: int | None = None) -> None:
        """A body of `size` bytes is about to come. Raises Overloaded when there is no room for it."""
        raise_it(self.problem(size, now_ns))

    def problem(self, size: int, now_ns: int | None = None) -> Overloaded | None:
        """take() for those who do not raise: why there is no room, None when there is.

        `size` 0: for a request whose bytes are counted, or so few that they are not; there is room unless more is held
        than may be.
        """
        now = monotonic_ns() if now_ns is None else now_ns
        total = self._total_for(size, now)
        if total + size > self.limit:
            if size > self.limit:
                return Overloaded(
                    f"{size} bytes can never be held: requests and answers may hold {self.limit} in all "
                    "(--max-held-bytes)"
                )
            another = f"another {size}" if size else "more"
            return Overloaded(
                f"requests and answers hold {total} bytes, of {self.limit} that they may hold in all "
                f"(--max-held-bytes): there is no room for {another}; send the request again later"
            )
        self._total += size
        return None

    def _total_for(self, size: int, now_ns: int) -> int:
        if size:
            if now_ns - self._looked_ns > GOOD_NS:
                self.look(now_ns)
            return self._total
        if now_ns - self._looked_ns <= GOOD_NS:
            return self._total
        if now_ns - self._seen_ns > GOOD_NS:
            self._seen, self._seen_ns = self.count(), now_ns
        return self._seen

    def made(self, size: int) -> None:
        """An answer of `size` bytes waits for its client from now on."""
        self._total += size
        if self._total > self.limit and not self.full:
            now = monotonic_ns()
            if now - self._looked_ns > GOOD_NS:
                self.look(now)

    def keep(self, size: int) -> None:
        """take() for somebody who is no source: the bytes are held until let_go(). Raises Overloaded."""
        self.take(size)
        self._kept += size

    def let_go(self, size: int) -> None:
        """Bytes of keep() are free again."""
        self._kept -= size
