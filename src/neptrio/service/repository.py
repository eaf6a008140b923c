"""The model repository extension (docs/protocol/model-repository-extension.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import trio

from neptrio.config import model_config
from neptrio.config.code_fields import code_of, confining
from neptrio.errors import Denied, InvalidArgument, TritonError, Unavailable
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.repository import model_names, override
from neptrio.repository.dry_run import dry_run
from neptrio.repository.manager import RepositoryManager
from neptrio.service.tokens import Account
from neptrio.settings import Settings

CHECKS = 2  # that work at the same time


def check_name(name: str) -> None:
    """Raises InvalidArgument for a name that no model can have, before it is used in any path."""
    if not name.strip():
        raise InvalidArgument(f"model name must not be empty or only white space, got '{shown(name)}'")
    if name in (".", "..") or any(separator in name for separator in "/\\\0"):
        raise InvalidArgument(
            "model name must not be a path, expected the name of a folder in a model repository, got "
            f"'{shown(name)}'"
        )


def _reach_check(client: Account | None) -> Callable[[str], None] | None:
    """What raises Denied for a name that `client` may not use: as an alias, which has requests for it answered by a model of its
    choice, or as a step of an ensemble, which would ask that model for it. None where it may use any."""
    if client is None or client.client.models is None:
        return None
    who = client.client

    def check(name: str) -> None:
        if not who.covers(name):
            raise Denied(f"{who.title} is limited to some models: it is not for model '{shown(name)}'")

    return check


class RepositoryService:
    """Index, load and unload; names of versions and models."""

    def __init__(
        self,
        settings: Settings,
        repository: RepositoryManager,
        of_models: bool = False,
        host: str | None = None,
    ) -> None:
        """`of_models`: the callers are models of this server, which may do what settings deny to the network.
        `host`: what the listener listens on that the callers come by, "" for a Unix socket; None: they come by a program
        that hosts the server, nobody knows from where, so they are taken for clients on other machines.
        """
        self._settings = settings
        self._repository = repository
        self._of_models = of_models
        self._host = host
        self._checks = trio.CapacityLimiter(CHECKS)

    def _may(self, what: str, parameters: dict[str, Any]) -> None:
        """Raises Denied for a verb or a parameter that settings deny to the network."""
        if self._of_models:
            return
        self._settings.change(what)
        if not self._settings.takes_files(self._host) and any(
            key.startswith(override.FILE) for key in parameters
        ):
            raise Denied(
                "files in load calls run as code, and the server takes them only by a loopback address or a Unix socket "
                "of its own, unless it is started with --allow-file-override=true"
            )

    async def _may_run(self, name: str, parameters: dict[str, Any]) -> None:
        """Raises Denied for a configuration that names code which the model's own does not name, and that runs now does
        not, or that leaves out what confines the model's code, where the network may not send files."""
        text = parameters.get("config")
        if self._of_models or self._settings.takes_files(self._host) or not isinstance(text, str):
            return
        record = self._repository.records.get(name)
        running = record.source.config if record is not None and record.source is not None else None

        def look() -> None:
            try:
                asked = dict.fromkeys(code_of(model_config.parse_json(text, "load parameter 'config'")))
            except TritonError:
                return  # the load says what is wrong
            known = set(code_of(running)) if running is not None else set()
            confined: list[tuple[str, str]] = []
            for folder in self._repository.repositories.folders(name):
                try:
                    own = model_config.read(folder, self._settings.model_config_name).config
                except (TritonError, OSError):
                    continue
                known |= set(code_of(own))
                confined += [each for each in confining(own) if each not in asked]
            for place, value in asked:
                if (place, value) not in known:
                    raise Denied(
                        f"{place} decides what code runs, and the server takes it from the model's own configuration "
                        f"only, which does not have '{value}'; --allow-file-override=true allows it over the network"
                    )
            if confined:
                place, value = confined[0]
                raise Denied(
                    f"{place} confines the model's code, so what is sent must have the '{value}' of the model's own "
                    "configuration; --allow-file-override=true allows to leave it out over the network"
                )

        await threads.run(look, abandon_on_cancel=True)

    def at(self, host: str) -> RepositoryService:
        """The same for callers that come by a listener on `host`, "" for a Unix socket."""
        return RepositoryService(self._settings, self._repository, host=host)

    async def index(self, ready: bool, timings: bool = False, repository: str = "") -> list[dict[str, Any]]:
        """The $repository_index_response; with `timings` also when each version was loaded and how long that
        took (our extension). `repository` is what the client calls the one that it asks for. Raises NotFound."""
        return list(await self.index_rows(ready, timings, repository))

    async def index_rows(
        self, ready: bool, timings: bool = False, repository: str = ""
    ) -> Iterator[dict[str, Any]]:
        """The rows of index(), each made when it is asked for: there may be thousands."""
        names = await self._repository.repositories.listed(repository)
        return self._repository.index_rows(ready, timings, names, repository)

    async def index_texts(
        self, ready: bool, form: str, text: Callable[[dict[str, Any]], bytes], repository: str = ""
    ) -> Iterator[bytes]:
        """`text(row)` of each of the rows without timings. `form` names what `text` makes: of a model whose rows show the
        same as when they were last asked for in that form, it is not made again."""
        names = await self._repository.repositories.listed(repository)
        return self._repository.index_texts(ready, form, text, names, repository)

    async def progress(self, name: str) -> dict[str, Any]:
        """The model's versions, its load under way and the last error (our extension). Raises NotFound."""
        return await self._repository.progress(name)

    async def names(self, name: str) -> dict[str, Any]:
        """The model's version labels and aliases (our extension). Raises NotFound."""
        return await self._repository.told_names(name)

    async def set_names(
        self, name: str, given: dict[str, Any], client: Account | None = None
    ) -> dict[str, Any]:
        """Sets version labels and aliases of a model, allowed only where load() is; `client` is who asks. Raises NotFound,
        InvalidArgument, Unavailable, or Denied."""
        if not self._settings.loads_by_request:
            where = "change the model's configuration" if self._settings.model_control_mode == "poll" else ""
            raise Unavailable(
                "setting labels is not allowed without --model-control-mode=explicit"
                + (f": {where}" if where else "")
            )
        self._may("setting labels", {})
        change = model_names.parse(given)
        check_reach = _reach_check(client)
        if check_reach is not None:
            check_reach(self._repository.own_name(name))  # an alias gives no say over the model behind it
            for alias in change.aliases:
                check_reach(alias)
        return await self._repository.set_names(name, change)

    def _by_its_own_name(self, name: str) -> None:
        own = self._repository.own_name(name)
        if own != name:
            raise InvalidArgument(
                f"'{shown(name)}' is an alias of model '{shown(own)}': models are loaded and unloaded by their own names"
            )

    async def check(self, name: str, parameters: dict[str, Any]) -> bytes:
        """A dry run of load() as JSON: the problems it would meet, and the differences to what is loaded (our
        extension).

        Allowed only where load() is: it writes files that callers send to disk. Raises Unavailable, Denied,
        NotFound, or InvalidArgument for broken parameters.
        """
        if not self._settings.loads_by_request:
            raise Unavailable("checking a model needs --model-control-mode=explicit")
        self._may("checking models", parameters)
        await self._may_run(name, parameters)
        return await dry_run(self._settings, self._repository, name, override.parse(parameters), self._checks)

    def _explicit(self) -> None:
        mode = self._settings.model_control_mode
        if mode == "poll":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        if mode not in ("explicit", "on-demand"):
            raise Unavailable(
                "explicit model load / unload is not allowed without --model-control-mode=explicit"
            )

    async def load(
        self, name: str, parameters: dict[str, Any], repository: str = "", client: Account | None = None
    ) -> None:
        """Loads or reloads a model, from any repository or the one that the client calls `repository`; returns when it
        serves, or at once with the parameter `async`. `client` is who asks.

        Raises the load's error, InvalidArgument for a name that no model can have, NotFound for a repository that there is
        not, or Denied.
        """
        self._explicit()
        check_name(name)
        self._may("loading models", parameters)
        self._by_its_own_name(name)
        await self._may_run(name, parameters)
        await self._repository.load(name, parameters, repository, _reach_check(client))

    async def unload(self, name: str, unload_dependents: bool = False, repository: str = "") -> None:
        """Unloads; returns once no new request is accepted. Raises InvalidArgument as load() does, and NotFound for a
        repository that there is not, or that is not the one that the model was loaded from."""
        self._explicit()
        check_name(name)
        self._may("unloading models", {})
        self._by_its_own_name(name)
        await self._repository.unload(name, unload_dependents, repository)
