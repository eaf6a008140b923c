"""What front ends know of the models that serve: a description of each version, as JSON.

The problem: a front end has to know every model, and there may be thousands, of which one changes at a time. The choice:
only models are described anew for which the notifier of readiness was told since the last look, and only descriptions that differ
are sent; a front end that starts is sent all.

Rules:
 1. A front end that was sent the whole table, and then every part in order, knows what document() without names says.
 2. A model without a version that serves is described by an empty list.
 3. An alias is described as its model is, by that model's versions; a version has its labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from neptrio.repository.catalog import Catalog
from neptrio.repository.model import Model

NOTHING = b"[]"


class ModelTable:
    """The descriptions as of the last look. Trio thread only."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen: int | None = None  # how often it had been notified at the last look
        self._texts: dict[str, bytes] = {}  # model -> its versions that serve, a JSON list

    def renew(self) -> list[str]:
        """Looks again; returns the models of which something has changed."""
        notifier = self._catalog.readiness
        names = None if self._seen is None else notifier.names_since(self._seen)
        self._seen = notifier.notified
        aliased = self._catalog.names.aliased
        if names is None:
            names = {*self._texts, *self._catalog.records, *aliased}
        elif aliased:
            names |= {alias for name in names for alias in self._catalog.names.aliases(name)}
        changed = []
        for name in sorted(names):
            text = self._describe(name)
            if text == self._texts.get(name, NOTHING):
                continue
            changed.append(name)
            if text == NOTHING:
                del self._texts[name]
            else:
                self._texts[name] = text
        return changed

    def document(self, names: Iterable[str] | None = None) -> bytes:
        """The descriptions of these models, or of all: a JSON object, model -> list of versions."""
        texts = self._texts
        chosen = texts if names is None else names
        return (
            b"{"
            + b",".join(json.dumps(name).encode() + b":" + texts.get(name, NOTHING) for name in chosen)
            + b"}"
        )

    def _describe(self, name: str) -> bytes:
        name = self._catalog.own_name(name)
        latest = self._catalog.latest.get(name)
        labels: dict[str, list[str]] = {}
        for label, number in self._catalog.names.labels(name).items():
            labels.setdefault(str(number), []).append(label)
        rows = [
            _row(model, model is latest, labels.get(model.version, []))
            for model in self._catalog.each_ready([name])
        ]
        return json.dumps(rows).encode()


def _row(model: Model, latest: bool, labels: list[str]) -> dict[str, Any]:
    return {
        "version": model.version,
        "labels": labels,
        "latest": latest,
        "decoupled": model.decoupled,
        "max_batch_size": model.max_batch_size,
        "inputs": [
            (spec.name, spec.dtype, spec.dims, spec.optional, spec.ragged) for spec in model.input_specs
        ],
    }
