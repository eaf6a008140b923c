"""Server metadata, model metadata, model configuration, health (docs/protocol/observed.md 2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from neptrio import __version__
from neptrio.config import describe_config
from neptrio.config.defaulted import defaulted
from neptrio.errors import Code, TritonError
from neptrio.repository.manager import RepositoryManager
from neptrio.repository.model import Model
from neptrio.repository.notifier import Notifier
from neptrio.settings import Settings

EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class MetadataService:
    """What this server and its models are, and whether they are ready."""

    def __init__(self, settings: Settings, repository: RepositoryManager) -> None:
        self._settings = settings
        self._repository = repository
        self._exiting = False

    @property
    def exiting(self) -> bool:
        """True from the moment a signal asks the server to stop."""
        return self._exiting

    @exiting.setter
    def exiting(self, value: bool) -> None:
        self._exiting = value
        self.readiness.notify()

    def live(self) -> bool:
        """The answer to the liveness probe: True as long as the process serves."""
        return True

    def ready(self) -> bool:
        """The readiness probe's answer: not exiting, and with --strict-readiness every model is ready."""
        return not self._exiting and (not self._settings.strict_readiness or self._repository.all_ready())

    @property
    def readiness(self) -> Notifier:
        """Rings whenever ready() may have changed."""
        return self._repository.readiness

    def server(self) -> dict[str, Any]:
        """The $metadata_server_response."""
        return {"name": self._settings.id, "version": __version__, "extensions": list(EXTENSIONS)}

    def absent(self, name: str, version: str) -> Callable[[], Awaitable[None]] | None:
        """What to call and await before what follows is asked of a model that is loaded on demand and does not serve; it
        raises Unavailable where it cannot be loaded. None: nothing."""
        demand = self._repository.demand
        return None if demand is None else demand.present(name, version, infers=False)

    async def present(self, name: str, version: str) -> None:
        """Awaits that."""
        waiting = self.absent(name, version)
        if waiting is not None:
            await waiting()

    async def model_ready(self, name: str, version: str, loaded: bool = False) -> bool:
        """True when that version (the latest when empty) is ready and its instances say that they can serve. One that is
        loaded on demand counts as ready while it is not, unless `loaded` or its last load has failed."""
        demand = self._repository.demand
        if demand is not None and not loaded:
            own = self._repository.own_name(name)
            served = demand.will_serve(own, self._repository.number(own, version) if version else 0)
            if served is not None:
                return served
        try:
            return await self._repository.lookup(name, version).is_ready()
        except TritonError as error:
            if error.code in (Code.INVALID_ARG, Code.NO_LABEL):
                raise
            return False

    def model(self, name: str, version: str) -> dict[str, Any]:
        """The $metadata_model_response."""
        model = self._repository.lookup(name, version)
        versions = [model.version] if version else self._repository.ready_versions(model.name)
        batching = model.max_batch_size > 0
        return {
            "name": model.name,
            "versions": [str(v) for v in versions],
            "platform": model.platform,
            "inputs": describe_config.metadata_tensors(model.config.input, batching),
            "outputs": describe_config.metadata_tensors(model.config.output, batching),
        }

    def serving(self, name: str = "") -> Iterator[Model]:
        """The model versions that serve, sorted by name and version, or those of one model. Each is looked for when it is
        asked for."""
        return self._repository.each_ready([self._repository.own_name(name)] if name else None)

    def config_message(self, name: str, version: str) -> Any:
        """The version's inference.ModelConfig."""
        return self._repository.lookup(name, version).config

    def labels(self, name: str, version: str) -> dict[str, list[bytes]]:
        """The version's labels of classes, by output."""
        found: dict[str, list[bytes]] = self._repository.lookup(name, version).labels
        return found

    def config(self, name: str, version: str, marked: bool = False) -> dict[str, Any]:
        """The config endpoint's JSON object. `marked` adds "defaulted" (our extension): paths of what the server has
        filled in, null where that is not known."""
        model = self._repository.lookup(name, version)
        found = describe_config.to_dict(model.config)
        if marked:
            found["defaulted"] = None if model.written is None else defaulted(model.written, model.config)
        return found
