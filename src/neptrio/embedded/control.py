"""Everything that is no inference, as functions of a running server; they run on its loop.

The server's owner calls them, so what settings deny to the network (--read-only, mode none) is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from neptrio.errors import TritonError
from neptrio.repository.model_names import parse
from neptrio.repository.override import FILE
from neptrio.server import Server
from neptrio.service.repository import check_name
from neptrio.service.statistics import Detail


async def ready(core: Server) -> bool:
    """Readiness, as the health probe tells it."""
    return core.verbs.metadata.ready()


async def server_metadata(core: Server) -> dict[str, Any]:
    """Name, version, extensions."""
    return core.verbs.metadata.server()


async def model_ready(core: Server, name: str, version: str) -> bool:
    """Whether a model serves and says that it can."""
    return await core.verbs.metadata.model_ready(name, version)


async def model_metadata(core: Server, name: str, version: str) -> dict[str, Any]:
    """A model's inputs and outputs."""
    await core.verbs.metadata.present(name, version)
    return core.verbs.metadata.model(name, version)


async def model_config(core: Server, name: str, version: str) -> dict[str, Any]:
    """A model's complete configuration."""
    await core.verbs.metadata.present(name, version)
    return core.verbs.metadata.config(name, version)


async def index(core: Server, ready_only: bool) -> list[dict[str, Any]]:
    """The models of all repositories with their states and reasons."""
    return await core.verbs.repository.index(ready_only)


async def load(
    core: Server, name: str, config: Mapping[str, Any] | str | None, files: Mapping[str, bytes] | None
) -> None:
    """Loads or reloads a model, and returns when it serves."""
    check_name(name)
    parameters: dict[str, Any] = {}
    if config is not None:
        parameters["config"] = config if isinstance(config, str) else json.dumps(config)
    for path, content in (files or {}).items():
        parameters[path if path.startswith(FILE) else FILE + path] = bytes(content)
    await core.repository.load(name, parameters)


async def serves(core: Server, name: str) -> bool:
    """Whether requests to a model are taken."""
    try:
        core.services.admission.sought(name, "")
    except TritonError:
        return False
    return True


async def unload(core: Server, name: str, unload_dependents: bool) -> None:
    """Takes a model out of service; accepted requests are still answered."""
    check_name(name)
    await core.repository.unload(name, unload_dependents)


async def names(core: Server, name: str) -> dict[str, Any]:
    """A model's version labels and aliases."""
    return await core.repository.told_names(name)


async def set_names(
    core: Server, name: str, labels: Mapping[str, int | None], aliases: Mapping[str, bool | None]
) -> dict[str, Any]:
    """Sets version labels and aliases of a model."""
    return await core.repository.set_names(name, parse({"labels": dict(labels), "aliases": dict(aliases)}))


async def statistics(core: Server, model: str, version: str, live: bool) -> dict[str, Any]:
    """The statistics extension's answer."""
    return core.verbs.statistics.model_statistics(model, version, Detail(live=live))


async def trace_settings(core: Server, changes: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Changes trace settings (none with an empty mapping) and returns them."""
    return await core.verbs.trace.update(changes, model)


async def log_settings(core: Server, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes log settings (none with an empty mapping) and returns them."""
    return core.verbs.logging.update(dict(changes))


async def sequences(core: Server, model: str, version: str) -> dict[str, Any]:
    """A model's live sequences."""
    return await core.verbs.sequences.list(model, version)


async def sequence_lives(core: Server, model: str, version: str, sequence_id: int | str) -> bool:
    """Whether a model has that sequence now."""
    try:
        found = core.services.admission.lookup(model, version).scheduler.of_sequences
    except TritonError:
        return False
    return found is not None and bool(found.live_keys(sequence_id))


async def metrics(core: Server) -> str:
    """The text of the metrics page."""
    return b"".join(await core.metrics.document()).decode()
