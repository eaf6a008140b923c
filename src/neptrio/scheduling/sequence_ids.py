"""The ids by which a model knows its sequences, where clients must say who they are.

The problem: with --auth-config each client has its sequence ids for itself, so two sequences may have the same id at
the same time. But models keep state under the id that they are given (CORRID, `request.correlation_id()`): with one
id for both, a client could read or change what belongs to another. The choice: a model is given the client's own id
as long as no other client's sequence has it there, and otherwise an id that the server makes.

Rules:
 1. A sequence gets its id here when its first request is issued, and gives it back when it leaves its slot.
 2. Two ids count as the same if they look the same to the model: as integers of CORRID's size.
 3. One client may use an id again while accepted requests of its last sequence with that id still run, as everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from neptrio.scheduling.sequence_slots import Key, Sequence
from neptrio.scheduling.sequence_tensors import Controls

FIRST_MADE = 1 << 30  # fits every type that CORRID may have


class ModelIds:
    """The ids that one model was given for live sequences of owners."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._held: dict[int | str, tuple[str, int]] = {}  # id -> its owner, and how many sequences have it
        self._made = itertools.count(FIRST_MADE)

    def __len__(self) -> int:
        return len(self._held)

    def give(self, sequence: Sequence, live: Mapping[Key, Sequence]) -> int | str:
        """The id by which the model knows `sequence`. `live` are the live sequences by key; those without an owner
        have their id as key."""
        if sequence.shown is None:
            owner = sequence.owner or ""
            given: int | str = sequence.id
            while not self._free(given, owner, live):
                number = next(self._made)
                given = str(number) if isinstance(sequence.id, str) else number
            distinct = self._controls.distinct(given)
            self._held[distinct] = owner, self._held.get(distinct, (owner, 0))[1] + 1
            sequence.shown = given
        return sequence.shown

    def _free(self, given: int | str, owner: str, live: Mapping[Key, Sequence]) -> bool:
        held = self._held.get(self._controls.distinct(given))
        return (held is None or held[0] == owner) and (not owner or given not in live)

    def take_back(self, sequence: Sequence) -> None:
        """The sequence has left its slot."""
        if sequence.shown is None:
            return
        distinct = self._controls.distinct(sequence.shown)
        owner, count = self._held.pop(distinct)
        if count > 1:
            self._held[distinct] = owner, count - 1
