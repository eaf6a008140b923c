"""Who clients are and how much each may do, where several front ends serve them.

Who somebody is follows from a token or certificate and the content of --auth-config, so a front end finds that out, with a
copy that the engine renews. How much somebody has used follows from what all front ends do, so the engine counts:

* requests when their message comes, which names the client and its address,
* connections before they are served: a front end asks, where there is a limit.

So limits are exact, and a front end that ends takes along what was counted for it. A front end also applies the limits on
addresses to what it sees itself. That refuses nothing that the engine would not refuse, and bounds what the
engine never hears of: malformed requests, and tokens that are not valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from neptrio.errors import raise_it
from neptrio.frontend.connection_balance import ConnectionBalance
from neptrio.request.infer_request import monotonic_ns
from neptrio.service.auth_config import AuthConfig
from neptrio.service.connections import Connections
from neptrio.service.request_limits import RequestLimits
from neptrio.service.tokens import Account, Clients

Counted = tuple[str, int]  # an address, and the gRPC stream or 0


class FrontClients(Clients):
    """The clients of --auth-config in a front end."""

    def __init__(self) -> None:
        super().__init__(AuthConfig({}))

    def count(self, account: Account, scopes: tuple[str, ...], now_ns: int) -> None:
        """Nothing: the engine counts."""


class FrontConnections(Connections):
    """The connections of a front end. Whether there are too many in all, the engine decides."""

    balance: ConnectionBalance

    def __init__(
        self, ask: bool, left: Callable[[str], None], descriptors: int, balance: ConnectionBalance
    ) -> None:
        """`ask`: there are limits, so ask_for_one() and answer() are called before each enter(). `left`: tells the engine of
        an end. `balance` is told how many there are."""
        super().__init__(descriptors=descriptors)
        self.ask = ask
        self._left = left
        self._answer = ""
        self._asked = 0
        self.balance = balance

    def ask_for_one(self) -> None:
        """The engine is asked to let one in that was accepted."""
        self._asked += 1
        self._tell()

    def answer(self, why: str) -> None:
        """What the engine says of the connection that enters next: "" lets it in."""
        self._asked -= 1
        self._answer = why

    def enter(self, descriptor: int, address: str) -> str:
        """See service.connections."""
        why, self._answer = self._answer, ""
        if not why:
            why = super().enter(descriptor, address)
            if why and self.ask:
                self._left(address)
        self._tell()
        return why

    def leave(self, address: str) -> None:
        super().leave(address)
        if self.ask:
            self._left(address)
        self._tell()

    def _tell(self) -> None:
        self.balance.has(self._asked + self.open)


class ClientsOfFront:
    """The engine's account of the connections and requests of one front end, by client address."""

    def __init__(self, connections: Connections, limits: RequestLimits) -> None:
        self._connections = connections
        self._limits = limits
        self._entered: Counter[str] = Counter()
        self._under_way: dict[str, Counter[int]] = {}  # address -> requests by stream; 0: of none
        self._counts: dict[str, Callable[[], int]] = {}

    def connect(self, address: str) -> str:
        """A connection asks to be let in. Returns "", or why it is turned away."""
        why = self._connections.enter(0, address)
        if not why:
            self._entered[address] += 1
        return why

    def disconnect(self, address: str) -> None:
        """A connection that was let in has ended. Raises ValueError when there is none."""
        if not self._entered[address]:
            raise ValueError("the end of a connection that was not let in")
        self._entered[address] -= 1
        self._connections.leave(address)

    def enter(self, client: Counted) -> None:
        """A request begins; leave() is owed. Raises TooManyRequests beyond a limit.

        The messages of a gRPC stream that are under way together count as one request at once, as the stream does
        without front ends.
        """
        address, stream = client
        mine = self._under_way.get(address)
        more = not (stream and mine is not None and mine[stream])
        raise_it(self._limits.problem(address, monotonic_ns(), int(more)))
        if mine is None:
            mine = self._under_way[address] = Counter()
            self._counts[address] = lambda: mine[0] + len(mine) - (0 in mine)
            self._limits.join(address, self._counts[address])
        mine[stream] += 1

    def leave(self, client: Counted) -> None:
        """A request is answered."""
        address, stream = client
        mine = self._under_way.get(address)
        if mine is None:
            return  # the front end has ended
        mine[stream] -= 1
        if not mine[stream]:
            del mine[stream]
        if not mine:
            del self._under_way[address]
            self._limits.leave(address, self._counts.pop(address))

    def end(self) -> None:
        """The front end has ended."""
        for address, count in self._entered.items():
            for _ in range(count):
                self._connections.leave(address)
        self._entered.clear()
        for address, counted in self._counts.items():
            self._limits.leave(address, counted)
        self._counts.clear()
        self._under_way.clear()
