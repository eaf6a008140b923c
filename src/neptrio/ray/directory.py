"""Who has which sequence: one actor for a deployment, which all replicas ask, those of all its versions.

The problem: a sequence's state is in one replica's memory, and its requests arrive wherever Ray's proxies send them:
proxies do not see bodies, and their choice changes whenever replicas come and go. The choice: the replica that
receives a sequence's request first keeps it and says so here; others ask, and pass on what is not theirs.

Rules:
 1. claim() is one step of one actor: of replicas that claim a sequence at the same time, one gets it.
 2. A sequence belongs to its replica until that replica gives it back, leaves, or is found dead.
 3. release() counts only if nobody has claimed since the replica looked: a request that was passed on meanwhile has
    perhaps begun the sequence anew.
 4. A directory that was started again knows nothing. Its incarnation differs, and replicas tell it again what they
    have; until then a sequence may be given to a second replica.
 5. The actor belongs to nobody: Ray would give every version of a deployment one of its own, and sequences would not
    survive an update. So it ends itself when no replica is left.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, TypedDict

import ray

NAMESPACE = "neptrio"
LOOK_SECONDS = 10.0


class Address(TypedDict):
    """Where a replica's engine listens for other replicas, as host:port."""

    http: str
    grpc: str


class Claim(TypedDict):
    """Whose a sequence is; `address` is None for the replica that asked."""

    owner: str
    address: Address | None
    incarnation: str


class SequenceDirectory:
    """The directory. Its methods run one at a time; only lost() waits."""

    def __init__(self) -> None:
        self._incarnation = secrets.token_hex(8)
        self._replicas: dict[str, Address] = {}
        self._owners: dict[str, str] = {}
        self._claims: dict[str, int] = {}
        self._watching: asyncio.Task[None] | None = None

    async def join(self, replica: str, address: Address, keys: list[str] = []) -> str:  # noqa: B006
        """A replica is there, and has these sequences. Returns the directory's incarnation."""
        self._replicas[replica] = address
        for key in keys:
            self._owners.setdefault(key, replica)
            self._claims.setdefault(key, 0)
        return self._incarnation

    async def leave(self, replica: str) -> None:
        """A replica has ended: its sequences are nobody's."""
        self._forget(replica)

    def _forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)
        for key in [key for key, owner in self._owners.items() if owner == replica]:
            del self._owners[key]
            self._claims.pop(key, None)

    async def claim(self, key: str, replica: str) -> Claim:
        """Whose the sequence is; it is the asking replica's if it was nobody's."""
        owner = self._owners.setdefault(key, replica)
        if owner != replica and owner not in self._replicas:
            owner = self._owners[key] = replica
        self._claims[key] = self._claims.get(key, 0) + 1
        address = None if owner == replica else self._replicas[owner]
        return {"owner": owner, "address": address, "incarnation": self._incarnation}

    async def held_by(self, replica: str) -> dict[str, int]:
        """The replica's sequences, and how often each has been claimed so far."""
        return {key: self._claims[key] for key, owner in self._owners.items() if owner == replica}

    async def release(self, replica: str, keys: dict[str, int]) -> list[str]:
        """Gives back those sequences that have been claimed no more often than said; returns them."""
        given = [
            key
            for key, claims in keys.items()
            if self._owners.get(key) == replica and self._claims.get(key) == claims
        ]
        for key in given:
            del self._owners[key], self._claims[key]
        return given

    async def lost(self, replica: str) -> bool:
        """Somebody could not reach a replica. If nobody listens at its address, it is forgotten; returns whether."""
        address = self._replicas.get(replica)
        if address is None:
            return True
        host, _, port = address["http"].rpartition(":")
        try:
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            if self._replicas.get(replica) == address:
                self._forget(replica)
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def replicas(self) -> dict[str, dict[str, Any]]:
        """All replicas: their addresses and numbers of sequences."""
        counts = dict.fromkeys(self._replicas, 0)
        for owner in self._owners.values():
            if owner in counts:
                counts[owner] += 1
        return {name: {**address, "sequences": counts[name]} for name, address in self._replicas.items()}

    async def watch(self) -> None:
        """Forgets replicas that have died, and ends the actor when none is left. Called once; returns at once."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for replica in list(self._replicas):
                await self.lost(replica)
            ray.get_runtime_context().current_actor.end_if_unused.remote()

    async def end_if_unused(self) -> None:
        """Ends the actor if there is no replica."""
        if not self._replicas:
            ray.actor.exit_actor()


def find(deployment: str) -> Any:
    """The handle of a deployment's directory, which is started if there is none. `deployment` has its application's name.

    Blocks.
    """
    actor = ray.remote(num_cpus=0)(SequenceDirectory)
    named = actor.options(
        name=f"sequences of {deployment}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    )
    handle = named.remote()
    ray.get(handle.watch.remote())
    return handle
