"""What is kept of a model that is loaded on demand while it is not loaded, and whether its folder still says so.

The problem: a request is looked at before its model is there (may it be answered over this protocol, is there such a version), and
folders change while thousands of models are away. Reading all of them again takes seconds, and even asking the system for the
state of 10,000 folders and their configurations takes ten times as long as listing them. The choice: each look asks for the next
ABOUT of them in turn, and reads those that have changed.

Rules:
 1. A configuration is read again when its file or the list of what is in the model's folder is another: by time, size and inode.
 2. A state that is younger than YOUNG_NS when it is looked at counts as changed: the next change may have the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neptrio.config import demand as demand_config
from neptrio.config import model_config, version_labels
from neptrio.config.demand import Residence
from neptrio.errors import TritonError
from neptrio.repository import scan

ABOUT = 500  # models at a look, about whose folders the system is asked: 6 ms of a thread
YOUNG_NS = 2_000_000_000  # file systems tell times by the second, some by two

# (path, modification time in ns, size, inode) of the folder and of what its configuration may be in; () is never current
FolderState = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a configuration says that a request may need before the model is loaded."""

    versions: tuple[int, ...]  # those that the version policy selects
    decoupled: bool
    max_batch_size: int
    inputs: tuple[tuple[str, int, tuple[int, ...], bool, bool], ...]
    labels: dict[str, int] = field(default_factory=dict)  # of versions
    aliases: tuple[str, ...] = ()  # further names

    @staticmethod
    def of(config: Any, versions: Iterable[int]) -> Signature:
        """Raises TritonError for a configuration of which a load will say what is wrong."""
        return Signature(
            tuple(versions),
            config.model_transaction_policy.decoupled,
            config.max_batch_size,
            tuple(
                (i.name, i.data_type, tuple(i.dims), i.optional, i.allow_ragged_batch) for i in config.input
            ),
            version_labels.labels(config),
            version_labels.aliases(config),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of a model's folder."""

    signature: Signature | None  # None: the configuration could not be read, the load will say why
    residence: Residence = field(default_factory=Residence)
    state: FolderState = ()  # the folder's before that


Listing = dict[str, Reading]


def read_folder(folder: Path, config_name: str, marked: bool) -> Reading | None:
    """What is kept of the model in a folder; None for one that is not loaded on demand. With `marked` it must say so."""
    state = _state(folder, config_name)
    try:
        config = model_config.read(folder, config_name).config
        if marked and not demand_config.on_demand(config):
            return None
        signature = Signature.of(config, scan.wanted(config, scan.versions(folder)))
        return Reading(signature, demand_config.residence(config), state)
    except (TritonError, OSError):  # the load says what is wrong
        return None if marked else Reading(None, state=state)


def current(state: FolderState) -> bool:
    """Whether a folder is still as it was (rule 1)."""
    return bool(state) and all(_state_of(one[0]) == one for one in state)


def _state(folder: Path, config_name: str) -> FolderState:
    found = [_state_of(str(folder))]
    for path in model_config.candidates(config_name):
        found.append(_state_of(f"{folder}/{path}"))
        if found[-1][3]:  # the others are not read
            break
    now = time.time_ns()
    return () if any(abs(now - one[1]) < YOUNG_NS for one in found) else tuple(found)


def _state_of(path: str) -> tuple[str, int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0, 0
    return path, found.st_mtime_ns, found.st_size, found.st_ino
