"""What a model's backend may ask of the server, answered by the verbs that answer clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from neptrio.codec.http_json import dump_json
from neptrio.errors import InvalidArgument, Unsupported
from neptrio.service import Verbs

SLICE = 32  # rows that are made before others have their turn: there may be thousands of models


async def described(
    verbs: Verbs, metrics: Callable[[], Awaitable[list[bytes]]] | None, subject: str, name: str, version: str
) -> str:
    """The answer as JSON, of a client's form; "true" or "false" for `ready` and `batching`, for `labels` an object of
    lists by output, for `metrics` the text that the metrics port answers. Raises TritonError.

    `metrics` makes the parts of that text, None where there is no such port."""
    metadata = verbs.metadata
    if subject in ("metadata", "config", "batching", "labels"):
        await metadata.present(name, version)
    if subject == "ready":
        return _text(metadata.ready())
    if subject == "server":
        return _text(metadata.server())
    if subject == "metadata":
        return _text(metadata.model(name, version))
    if subject == "config":
        return _text(metadata.config(name, version))
    if subject == "batching":
        return _text(metadata.config_message(name, version).max_batch_size > 0)
    if subject == "labels":
        return _text(
            {
                output: [label.decode(errors="replace") for label in found]
                for output, found in metadata.labels(name, version).items()
            }
        )
    if subject == "statistics":
        return '{"model_stats":[' + await _joined(verbs.statistics.rows(name, version)) + "]}"
    if subject in ("index", "ready index"):
        rows = await verbs.repository.index_rows(subject == "ready index")
        return "[" + await _joined(rows) + "]"
    if subject == "metrics":
        if metrics is None:
            raise Unsupported("the server has no metrics port (--allow-metrics=false), so it tells none")
        return b"".join(await metrics()).decode()
    raise InvalidArgument(f"the server says nothing of '{subject}'")


def _text(found: Any) -> str:
    return str(dump_json(found), "utf-8")


async def _joined(rows: Any) -> str:
    made = []
    for row in rows:
        made.append(_text(row))
        if len(made) % SLICE == 0:
            await trio.lowlevel.checkpoint()
    return ",".join(made)
