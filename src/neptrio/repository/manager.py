"""The models that are served: which, in what state, and how they come and go."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from neptrio._cext.mailbox import CompletionQueue
from neptrio.backends import registry
from neptrio.backends.base import Backend, LoadContext
from neptrio.errors import Internal, InvalidArgument, NotFound, TritonError, Unavailable
from neptrio.model import config as model_config
from neptrio.model import defaults, validate_config
from neptrio.model.config import ConfigSource
from neptrio.model.model import Model
from neptrio.observe.memory import MemoryProbe
from neptrio.repository import scan
from neptrio.scheduling import ensemble_graph
from neptrio.scheduling.base import LoopServices
from neptrio.settings import Settings

log = logging.getLogger("neptrio.repository")


@dataclass
class VersionState:
    """One row of the index."""

    state: str
    reason: str = ""
    model: Model | None = None


class RepositoryManager:
    """Finds, loads, serves and unloads models. Lives on the trio thread."""

    def __init__(
        self, settings: Settings, loop: LoopServices, completions: CompletionQueue, services: Any = None
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._completions = completions
        self.services = services
        self._known: dict[str, dict[int, VersionState]] = {}
        self._latest: dict[str, Model] = {}
        self._loading: dict[str, trio.Event] = {}
        self._memory = MemoryProbe()
        self._limiter = trio.CapacityLimiter(settings.model_load_thread_count)

    # ------------------------------------------------------------ serving

    def lookup(self, name: str, version: str = "") -> Model:
        """The ready version asked for, or the highest ready one. Texts as in spec/features.md A1."""
        if not version:
            model = self._latest.get(name)
            if model is not None:
                if not model.ready:
                    raise Unavailable(
                        f"Request for unknown model: '{name}' version {model.version} is not at ready state"
                    )
                return model
            if name in self._known:
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        try:
            number = int(version) if len(version) < 19 else None
        except ValueError:
            number = None
        if number is None:
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}' (details: stol), version "
                "should be an integral value > 0"
            )
        if number <= 0:
            raise InvalidArgument(
                f"invalid model version specified '{version}' , version should be an integral value > 0"
            )
        versions = self._known.get(name)
        if versions is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        row = versions.get(number)
        if row is None:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if row.model is None or not row.model.ready:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return row.model

    def ready_versions(self, name: str) -> list[int]:
        """Ready version numbers of a model, ascending."""
        rows = self._known.get(name, {})
        return sorted(v for v, row in rows.items() if row.model is not None and row.model.ready)

    def ready_models(self) -> list[Model]:
        """Every ready version, by name, then version number."""
        return [
            row.model
            for name in sorted(self._known)
            for _, row in sorted(self._known[name].items())
            if row.model is not None and row.model.ready
        ]

    def all_ready(self) -> bool:
        """Strict readiness: no version loading, unloading or failed."""
        return all(
            (row.state == "READY" and row.model is not None and row.model.ready) or row.reason == "unloaded"
            for rows in self._known.values()
            for row in rows.values()
        )

    def index(self, ready: bool) -> list[dict[str, str]]:
        """The rows of the repository index, sorted by name and version."""
        names = set(scan.model_dirs(self._settings.model_repository)) | set(self._known)
        rows: list[dict[str, str]] = []
        for name in sorted(names):
            known = self._known.get(name)
            if not known:
                if not ready:
                    rows.append({"name": name})
                continue
            for version, row in sorted(known.items()):
                state, reason = row.state, row.reason
                if row.state == "READY" and row.model is not None and not row.model.ready:
                    state, reason = "UNAVAILABLE", row.model.reason  # broken, or being restarted
                if ready and state != "READY":
                    continue
                entry = {"name": name, "version": str(version), "state": state}
                if reason:
                    entry["reason"] = reason
                rows.append(entry)
        return rows

    # ------------------------------------------------------------ coming and going

    async def load_all(self) -> None:
        """Start-up: loads every model (modes none and poll) or those named (explicit)."""
        names = list(scan.model_dirs(self._settings.model_repository))
        if self._settings.model_control_mode == "explicit" and "*" not in self._settings.load_model:
            names = list(self._settings.load_model)
        failed: list[str] = []

        async def one(name: str) -> None:
            try:
                event = self._loading.get(name)
                if event is not None:
                    await event.wait()
                if name not in self._latest:
                    await self.load(name, {})
            except TritonError as error:
                failed.append(name)
                log.error("%s", error)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(one, name)
        if failed and self._settings.exit_on_error:
            raise Internal("failed to load all models")

    async def load(self, name: str, parameters: dict[str, Any]) -> None:
        """Loads or reloads a model from its folder. Raises TritonError."""
        while name in self._loading:
            await self._loading[name].wait()
        self._loading[name] = trio.Event()
        try:
            await self._load(name, parameters)
        finally:
            self._loading.pop(name).set()

    async def _load(self, name: str, parameters: dict[str, Any]) -> None:
        found = scan.model_dirs(self._settings.model_repository).get(name)
        if not found:
            raise Internal(f"failed to load '{name}', failed to poll from model repository")
        model_dir = found[0]
        try:
            source = model_config.read(model_dir, self._settings.model_config_name)
            defaults.identify(source, name, model_dir, not self._settings.disable_auto_complete_config)
            config = source.config
        except TritonError as error:
            self._known.setdefault(name, {})[0] = VersionState("UNAVAILABLE", str(error))
            raise Internal(
                f"failed to load '{name}', failed to poll from model repository: {error}"
            ) from None
        await self._load_children(name, config)
        versions = scan.wanted(config, scan.versions(model_dir))
        if not versions:
            raise InvalidArgument(
                f"load failed for model '{name}': at least one version must be available under the version "
                f"policy of model '{name}'\n"
            )
        rows = self._known.setdefault(name, {})
        old = [row.model for row in rows.values() if row.model is not None]
        for version in versions:
            if version not in rows or rows[version].model is None:
                rows[version] = VersionState("LOADING")
        loaded: dict[int, Model] = {}
        for version in versions:
            try:
                loaded[version] = await self._load_version(name, version, model_dir, source)
            except TritonError as error:
                reason = f"{error.code.title}: {error}"
                if rows[version].model is None:
                    rows[version] = VersionState("UNAVAILABLE", reason)
                for model in loaded.values():
                    await model.stop()
                raise InvalidArgument(
                    f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {reason};\n"
                ) from error
        for version, model in loaded.items():
            rows[version] = VersionState("READY", model=model)
        self._latest[name] = loaded[max(loaded)]
        for model in old:
            await self._retire(model)

    async def _load_children(self, name: str, config: Any) -> None:
        """Loads the models an ensemble is composed of, those that are not ready yet."""
        failed: list[str] = []

        async def one(child: str) -> None:
            if child not in self._loading and child not in self._latest:
                try:
                    await self.load(child, {})
                except TritonError as error:
                    log.error("%s", error)
            else:
                event = self._loading.get(child)
                if event is not None:
                    await event.wait()
            if child not in self._latest:
                failed.append(child)

        async with trio.open_nursery() as nursery:
            for child in ensemble_graph.child_names(config):
                if child != name:
                    nursery.start_soon(one, child)
                else:
                    failed.append(child)
        if failed:
            raise InvalidArgument(
                f"load failed for model '{name}': ensemble {name} contains models that are not available or "
                f"ambiguous: {', '.join(sorted(failed))}\n"
            )

    async def _load_version(self, name: str, version: int, model_dir: Path, source: ConfigSource) -> Model:
        own = model_config.new_config()
        own.CopyFrom(source.config)
        context = LoadContext(
            name, version, model_dir, model_dir / str(version), own, self._settings, self.services
        )

        def read() -> Backend:
            backend_class = registry.find_for(own, self._settings)
            if not self._settings.disable_auto_complete_config:
                backend_class.auto_complete(context)
            defaults.fill(own, backend_class)
            validate_config.check(source, own, model_dir)
            backend = backend_class(context)
            backend.load()
            return backend

        try:
            with self._memory.measure() as measured:
                backend = await trio.to_thread.run_sync(read, limiter=self._limiter, abandon_on_cancel=True)
                model = Model(context, backend, self._loop, self._completions)
                await model.start()
            model.measured(measured)
        except TritonError:
            raise
        except Exception as error:
            log.exception("loading %s version %d failed", name, version)
            raise Internal(f"{type(error).__name__}: {error}") from error
        return model

    async def _retire(self, model: Model) -> None:
        await model.drain()
        await model.stop()

    async def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes the model out of service; accepted requests finish."""
        self._latest.pop(name, None)
        for row in self._known.get(name, {}).values():
            if row.model is not None:
                model = row.model
                row.state, row.reason, row.model = "UNLOADING", "", None
                await self._retire(model)
                row.state, row.reason = "UNAVAILABLE", "unloaded"

    def flush(self) -> None:
        """Shutdown has begun: no scheduler waits any longer for company before it sends."""
        for model in self.ready_models():
            model.scheduler.flush()

    async def unload_all(self) -> None:
        """Shutdown: drains and unloads everything."""
        async with trio.open_nursery() as nursery:
            for name in list(self._known):
                nursery.start_soon(self.unload, name, False)
