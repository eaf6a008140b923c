"""Which models an ensemble was built with, and whether those still serve.

The problem: an ensemble is built to fit the models of its steps as they are at that moment, their tensors and whether they are
decoupled. Each of them may be loaded anew at any time, also while a load of the ensemble is under way that then finds nothing to do,
or fails. The choice: an ensemble's record keeps the models that it was built with, and whoever asks compares them with those
that serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neptrio.repository.model import Model
from neptrio.repository.records import Record

Steps = dict[str, dict[int, Model]]  # a model -> its versions that serve


def serving(records: Mapping[str, Record], children: Iterable[str]) -> Steps:
    """The models that serve an ensemble with these steps."""
    return {child: records[child].serving if child in records else {} for child in children}


def outdated(records: Mapping[str, Record], record: Record) -> bool:
    """Whether an ensemble serves that was built with other models than those that its steps have."""
    return bool(record.steps) and record.steps != serving(records, record.steps)
