"""Our sequences extension: lists a model's sequences and ends one (docs/sequences.md).

GET  v2/models/M[/versions/V]/sequences
POST v2/models/M[/versions/V]/sequences/ID/end     ?type=uint or ?type=string when ID is all digits
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs, unquote

from neptrio.errors import InvalidArgument, NotFound
from neptrio.repository.manager import RepositoryManager
from neptrio.repository.model import Model
from neptrio.request.infer_request import monotonic_ns
from neptrio.scheduling.sequence import SequenceScheduler
from neptrio.settings import Settings


def parse_id(segment: str, query: str = "") -> int | str:
    """The sequence id in a path segment: digits are an integer unless the query says type=string.

    Raises InvalidArgument.
    """
    kind = parse_qs(query).get("type", [""])[-1]
    text = unquote(segment)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
    if kind not in ("", "uint", "string"):
        raise InvalidArgument(f"type of a sequence id must be uint or string, got '{kind}'")
    if kind == "uint" and (number is None or number >= 1 << 64):
        raise InvalidArgument(f"'{text}' is no sequence id of type uint: expected an integer below 2^64")
    return text if kind == "string" or number is None or number >= 1 << 64 else number


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

    def list(self, name: str, version: str) -> dict[str, Any]:
        """The model's sequences, oldest first, and how many requests wait in its slots and its backlog.

        Raises NotFound, Unavailable or InvalidArgument.
        """
        model, scheduler = self._scheduler(name, version)
        statistics = scheduler.statistics()
        table = statistics.table
        return {
            "model_name": model.name,
            "model_version": model.version,
            "live": table.live,
            "slots": table.slots,
            "slots_used": table.slots_used,
            "null_requests": statistics.null_requests,
            "backlog": table.backlog_sequences,
            "backlog_requests": table.backlog_requests,
            "sequences": [asdict(row) for row in scheduler.sequences(monotonic_ns())],
        }

    def end(self, name: str, version: str, sequence_id: int | str) -> dict[str, Any]:
        """Ends a live sequence; requests of it that were accepted still run.

        Raises NotFound when there is none, Denied with --read-only.
        """
        self._settings.change("ending sequences")
        model, scheduler = self._scheduler(name, version)
        left = scheduler.end_sequence(sequence_id)
        if left is None:
            kind = "string" if isinstance(sequence_id, str) else "uint"
            raise NotFound(f"model '{model.name}' has no live sequence with the {kind} id {sequence_id}")
        return {"id": sequence_id, "reason": "evicted", "requests_left": left}
