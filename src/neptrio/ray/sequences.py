"""A replica's part in keeping sequences together: what it has claimed, and what it gives back.

Claims of its own are remembered, so that a sequence costs the directory's actor one call, not one per request. The
owner of another replica's sequence is asked for again and again: only so does a claim count (directory.py, rule 3).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from neptrio.errors import TritonError
from neptrio.ray import sequence_key
from neptrio.ray.directory import Address, Claim
from neptrio.request.infer_request import monotonic_ns
from neptrio.server import Server

log = logging.getLogger("neptrio.ray")
LOOK_SECONDS = 5.0
T = TypeVar("T")


async def live_ids(core: Server) -> set[int | str]:
    """The correlation ids of all live sequences of an engine; on its loop."""
    found: set[int | str] = set()
    for model in core.repository.ready_models():
        scheduler = None if model.scheduler is None else model.scheduler.of_sequences
        if scheduler is not None:
            found.update(row.id for row in scheduler.sequences(monotonic_ns()))
    return found


class Sequences:
    """The sequences of one replica. For tasks of its asyncio loop."""

    def __init__(
        self,
        replica: str,
        address: Address,
        directory: Callable[[], Any],
        ids: Callable[[], Awaitable[set[int | str]]],
    ) -> None:
        """`directory` finds the directory's actor; `ids` tells the correlation ids of the engine's live sequences."""
        self.replica = replica
        self.address = address
        self._find = directory
        self._actor: Any = None
        self._ids = ids
        self._incarnation = ""
        self._owned: Counter[str] = Counter()  # how often each was used here
        self._busy: Counter[str] = Counter()  # requests under way
        self._suspects: dict[str, int] = {}  # not live at the last look: claims at that time

    async def _ask(self, verb: str, *args: Any) -> Any:
        """Calls the directory; a second time, at a new actor, if the first has died."""
        for last in (False, True):
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._find)
            try:
                return await getattr(self._actor, verb).remote(*args)
            except Exception as error:
                self._actor = None
                # the actor's end has as many names as Ray has ways to notice it
                if last or not type(error).__module__.startswith("ray."):
                    raise
        return None

    async def join(self) -> None:
        """Tells the directory about this replica and what it has."""
        self._incarnation = await self._ask("join", self.replica, self.address, list(self._owned))

    async def leave(self) -> None:
        """Tells the directory that the replica has ended."""
        await self._ask("leave", self.replica)
        if self._actor is not None:
            self._actor.end_if_unused.remote()

    async def replicas(self) -> dict[str, Any]:
        """All replicas of the deployment with their addresses and numbers of sequences."""
        return dict(await self._ask("replicas"))

    async def owner(self, key: str) -> Claim | None:
        """The claim of the replica that has the sequence; None if this one has it, or nobody can be asked."""
        if self._owned[key]:
            self._owned[key] += 1
            return None
        del self._owned[key]
        try:
            claim: Claim = await self._ask("claim", key, self.replica)
            if claim["incarnation"] != self._incarnation:
                await self.join()
        except Exception as error:
            log.warning("the directory of sequences does not answer, '%s' stays here: %s", key, error)
            return None
        if claim["address"] is None:
            self._owned[key] += 1
            return None
        return claim

    async def lost(self, replica: str) -> bool:
        """A replica could not be reached; returns whether it is gone."""
        return bool(await self._ask("lost", replica))

    @contextmanager
    def using(self, key: str) -> Iterator[None]:
        """A request of the sequence is under way here."""
        self._busy[key] += 1
        try:
            yield
        finally:
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]

    async def watch(self) -> None:
        """Gives back sequences that have ended, again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except TritonError:
                return  # the engine has stopped
            except Exception as error:
                log.warning("the directory of sequences does not answer: %s", error)

    async def look(self) -> None:
        """Gives back what was not live at the last look nor is now, and was not touched in between."""
        used = dict(self._owned)
        claims: dict[str, int] = await self._ask("held_by", self.replica)
        if any(key not in claims for key in used if self._owned.get(key) == used[key]):
            await self.join()  # the directory was started again
        live = await self._ids()
        given: dict[str, int] = {}
        suspects: dict[str, int] = {}
        for key, count in claims.items():
            if self._busy.get(key) or sequence_key.parsed(key)[1] in live:
                continue
            touched = count + used.get(key, 0)
            if self._suspects.get(key) == touched and self._owned.get(key, 0) == used.get(key, 0):
                given[key] = count
                self._owned.pop(key, None)
            else:
                suspects[key] = touched
        self._suspects = suspects
        if given:
            await self._ask("release", self.replica, given)
