"""Our sequences extension: lists a model's sequences and ends one (docs/sequences.md).

GET  v2/models/M[/versions/V]/sequences
POST v2/models/M[/versions/V]/sequences/ID/end     ?type=uint or ?type=string when ID is all digits;
                                                   ?token=NAME: whose sequence, when several have the id

With --auth-config every client has its sequence ids for itself, and sees its own sequences only; a client with the
scope operate or admin sees all of them, and whose they are.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs, unquote

from neptrio.errors import InvalidArgument, NotFound
from neptrio.limits import shown
from neptrio.loop.slices import Slices
from neptrio.repository.manager import RepositoryManager
from neptrio.repository.model import Model
from neptrio.request.infer_request import monotonic_ns
from neptrio.scheduling.sequence import SequenceScheduler
from neptrio.service.tokens import Account
from neptrio.settings import Settings


def parse_id(segment: str, query: str = "") -> int | str:
    """The sequence id in a path segment: digits are an integer unless the query says type=string.

    Raises InvalidArgument.
    """
    kind = parse_qs(query).get("type", [""])[-1]
    text = unquote(segment)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
    if kind not in ("", "uint", "string"):
        raise InvalidArgument(f"type of a sequence id must be uint or string, got '{shown(kind)}'")
    if kind == "uint" and (number is None or number >= 1 << 64):
        raise InvalidArgument(
            f"'{shown(text)}' is no sequence id of type uint: expected an integer below 2^64"
        )
    return text if kind == "string" or number is None or number >= 1 << 64 else number


def parse_owner(query: str) -> str:
    """The name of the token whose sequence is meant; "" if the query does not say."""
    return parse_qs(query).get("token", [""])[-1]


class SequencesService:
    """Lists and ends sequences."""

    def __init__(self, settings: Settings, repository: RepositoryManager) -> None:
        self._settings = settings
        self._repository = repository

    def _scheduler(self, name: str, version: str) -> tuple[Model, SequenceScheduler]:
        model = self._repository.lookup(name, version)
        scheduler = None if model.scheduler is None else model.scheduler.of_sequences
        if scheduler is None:
            raise InvalidArgument(
                f"model '{model.name}' has no sequences: it is not configured for sequence_batching"
            )
        return model, scheduler

    async def list(self, name: str, version: str, client: Account | None = None) -> dict[str, Any]:
        """The model's sequences, oldest first, and how many requests wait in its slots and its backlog.

        `client` is who asks: its own sequences are listed, or all of them if it may end them. The numbers are of all.
        Raises NotFound, Unavailable or InvalidArgument.
        """
        model, scheduler = self._scheduler(name, version)
        statistics = scheduler.statistics()
        table = statistics.table
        rows = []
        slices = Slices()
        for found in scheduler.sequences(monotonic_ns()):
            await slices.rest()
            row = asdict(found)
            owner = row.pop("owner")
            if client is not None:
                if owner != client.name and not client.sees_all():
                    continue
                row["token"] = owner
            rows.append(row)
        return {
            "model_name": model.name,
            "model_version": model.version,
            "live": table.live,
            "slots": table.slots,
            "slots_used": table.slots_used,
            "null_requests": statistics.null_requests,
            "backlog": table.backlog_sequences,
            "backlog_requests": table.backlog_requests,
            "sequences": rows,
        }

    def end(
        self,
        name: str,
        version: str,
        sequence_id: int | str,
        client: Account | None = None,
        owner: str = "",
    ) -> dict[str, Any]:
        """Ends a live sequence; requests of it that were accepted still run.

        `client` is who asks, which may end its own sequences, or all. `owner` is the name of the token whose sequence
        is meant, "" where only one client has a sequence with that id. Raises NotFound when there is none that the
        client may end, InvalidArgument when there are several, Denied with --read-only.
        """
        self._settings.change("ending sequences")
        model, scheduler = self._scheduler(name, version)
        keys = scheduler.live_keys(sequence_id)
        if owner:
            keys = [key for key in keys if isinstance(key, tuple) and key[0] == owner]
        if client is not None and not client.sees_all():
            keys = [key for key in keys if isinstance(key, tuple) and key[0] == client.name]
        if len(keys) > 1:
            raise InvalidArgument(
                f"{len(keys)} tokens have a live sequence with the id {sequence_id} of model '{model.name}': say whose "
                "with ?token=NAME"
            )
        left = scheduler.end_sequence(keys[0]) if keys else None
        if left is None:
            kind = "string" if isinstance(sequence_id, str) else "uint"
            raise NotFound(f"model '{model.name}' has no live sequence with the {kind} id {sequence_id}")
        return {"id": sequence_id, "reason": "evicted", "requests_left": left}
