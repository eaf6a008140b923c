"""`neptrio.Server`: a whole server as an object of a Python program.

    async with neptrio.Server("models") as server:                 # trio or asyncio
        response = await server.model("simple").infer({"INPUT0": array, "INPUT1": array})

    with neptrio.Server("models").running() as server:             # ordinary code
        response = server.model("simple").infer({"INPUT0": array, "INPUT1": array})

Requests need no sockets and are otherwise like a client's: the same admission, schedulers, statistics and traces.
On trio the server runs in the caller's own loop, so a request costs no change of threads; elsewhere it has a
thread with a loop of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

import sniffio
import trio

from neptrio import storage_uri
from neptrio.embedded import control
from neptrio.embedded.blocking import RunningServer
from neptrio.embedded.engine import Engine, OwnThread, first_error
from neptrio.embedded.functions import FunctionModel, FunctionOptions, takes_function_options
from neptrio.embedded.functions_folder import FunctionsFolder
from neptrio.embedded.model import Model
from neptrio.embedded.server_settings import LOCAL, QUIET, ServerSettings, defaults
from neptrio.embedded.setting_values import checked
from neptrio.embedded.spelled_out import spelled_out
from neptrio.errors import NotFound, Unavailable
from neptrio.settings import Settings

PORTS = {"http_port": "allow_http", "grpc_port": "allow_grpc", "metrics_port": "allow_metrics"}
Repository = str | Path
Made = TypeVar("Made", bound=Callable[..., Any])
takes_settings = spelled_out(ServerSettings, defaults())


class Server:
    """A server and its models. It may run once.

    `model_repository`: a folder (or cloud storage URL) of models, or several; none for functions as models alone.
    `settings`: fields of neptrio.settings.Settings, which are the command's flags with `_`. REST, gRPC and metrics are
    off unless allow_http, http_port and so on switch them on; then they listen on the loopback address, unless
    http_address or grpc_address say otherwise. They are checked as flags are, and texts are read as flags read them:
    TypeError for an unknown setting or a wrong kind of value, ValueError for a wrong value.
    """

    @takes_settings
    def __init__(
        self, model_repository: Repository | Sequence[Repository] = (), **settings: Unpack[ServerSettings]
    ) -> None:
        given = checked(settings)
        one = isinstance(model_repository, (str, Path))
        repositories: Sequence[Repository] = [model_repository] if one else model_repository  # type: ignore[list-item, assignment]
        asked = {switch: True for port, switch in PORTS.items() if port in given}
        self._given = given
        self._settings = {**QUIET, **LOCAL, **asked, **given}
        self._repositories = [_repository(where) for where in repositories]
        self._functions: dict[str, FunctionModel] = {}
        self._folder: FunctionsFolder | None = None
        self._engine: Engine | None = None
        self._adding: dict[str, FunctionModel] = {}  # name -> function whose load is under way
        self._used = False
        self._stack: AsyncExitStack | None = None
        self._thread: OwnThread | None = None

    # ---------------------------------------------------------------- functions as models

    @overload
    def function(self, function: Made, /) -> Made: ...
    @overload
    def function(self, /, **options: Unpack[FunctionOptions]) -> Callable[[Made], Made]: ...

    @takes_function_options
    def function(
        self, function: Callable[..., Any] | None = None, /, **options: Unpack[FunctionOptions]
    ) -> Any:
        """Makes a function or class a model of this server: the decorator `@server.function`, alone or with options, which
        embedded.functions.FunctionOptions explains.

        It must be applied before the server starts; add() works later too. Raises TypeError for a function that cannot be
        a model.
        """
        if self._used:
            raise RuntimeError("the server has started: use add() for one more function")

        def decorate(function: Made) -> Made:
            made = FunctionModel(function, **options)
            if made.name in self._functions:
                raise ValueError(f"this server has a function model '{made.name}' already")
            self._functions[made.name] = made
            return function

        return decorate if function is None else decorate(function)

    def model(self, name: str, version: str = "") -> Model:
        """A model of this server by its name; it need not be loaded yet. Raises Unavailable before the server runs."""
        if not isinstance(name, str):
            raise TypeError("model() finds a model by its name; @server.function makes a function one")
        return Model(self._running(), name, version)

    @takes_function_options
    async def add(
        self, function: Callable[..., Any], *, replace: bool = False, **options: Unpack[FunctionOptions]
    ) -> Model:
        """Makes a function a model of the running server, and loads it. Options as for function().

        `replace`: instead of the function model of that name, if there is one; without it, one that is loaded stays, and
        ValueError is raised. Raises TritonError, or TypeError for a function that cannot be a model; the server's functions
        are then those from before.
        """
        engine = self._running()
        made = FunctionModel(function, **options)
        replaces = replace or not await engine.reach(control.serves, made.name)
        with self._added(made, replaces):
            await engine.reach(control.load, made.name, None, None)
        return Model(engine, made.name)

    async def remove(self, name: str) -> None:
        """Unloads a function model and forgets its function. Raises NotFound when there is none of that name."""
        self._removable(name)
        await self._running().reach(control.unload, name, False)
        self._forget(name)

    @contextmanager
    def _added(self, made: FunctionModel, replaces: bool) -> Iterator[None]:
        """Has the function's folder written; as before, with what it replaces, if the body fails. One at a time for each name.

        A body that is cancelled fails nothing: the load goes on, and with it the function. Raises ValueError.
        """
        try:
            # no lock: see rule 6 of embedded.engine
            if self._adding.setdefault(made.name, made) is not made:
                raise ValueError(f"function model '{made.name}' is being added")
            before = self._functions.get(made.name)
            if before is not None and not replaces:
                raise ValueError(
                    f"this server has a function model '{made.name}' already; replace=True takes its place"
                )
            assert self._folder is not None
            made.write(self._folder.path)
            self._functions[made.name] = made
            try:
                yield
            except Exception:
                self._forget(made.name)
                if before is not None:
                    before.write(self._folder.path)
                    self._functions[made.name] = before
                raise
            if before is not None:
                before.forget()
        finally:
            if self._adding.get(made.name) is made:
                del self._adding[made.name]

    def _removable(self, name: str) -> None:
        if name in self._adding:
            raise ValueError(f"function model '{name}' is being added")
        if name not in self._functions:
            raise NotFound(f"this server has no function model '{name}'")

    def _forget(self, name: str) -> None:
        made = self._functions.pop(name, None)
        if made is not None and self._folder is not None:
            made.remove(self._folder.path)

    @property
    def functions(self) -> Mapping[str, FunctionModel]:
        """The functions that are models, by the models' names."""
        return self._functions

    # ---------------------------------------------------------------- running

    @takes_settings
    def preset(self, **settings: Unpack[ServerSettings]) -> None:
        """Settings that hold whatever the server was made with: for programs that host the servers of others.

        Raises TypeError for an unknown one or a wrong kind, ValueError for a wrong value, RuntimeError when the server has started.
        """
        given = checked(settings)
        if self._used:
            raise RuntimeError("the server has started: its settings stay as they are")
        self._settings.update(given)

    @takes_settings
    def suggest(self, **settings: Unpack[ServerSettings]) -> None:
        """preset() for settings that hold only where the server was made without them."""
        new: dict[str, Any] = {name: value for name, value in settings.items() if name not in self._settings}
        self.preset(**new)

    def _once(self) -> Settings:
        """The settings of the one run. Raises RuntimeError at the second, ValueError for what does not fit together."""
        repositories, given = self._prepare(self._settings)
        try:
            return Settings(model_repository=repositories, **given)
        except BaseException:
            self._clean()
            raise

    def _prepare(self, given: dict[str, Any]) -> tuple[tuple[Repository, ...], dict[str, Any]]:
        """Makes the functions' repository; returns all repositories and the settings with what functions need."""
        if self._used:
            raise RuntimeError("this server has been started already: make another")
        self._used = True
        self._folder = FunctionsFolder()
        try:
            for function in self._functions.values():
                function.write(self._folder.path)
        except BaseException:
            self._clean()
            raise
        if given.get("model_control_mode") in ("explicit", "on-demand"):
            given = {**given, "load_model": (*given.get("load_model", ()), *self._functions)}
        return (*self._repositories, self._folder.path), given

    @contextmanager
    def command(self, app: str, own_processes: bool) -> Iterator[dict[str, Any]]:
        """For `neptrio serve`: the settings that the program gives, as defaults for flags.

        `app` is what embedded.functions.server_of() finds this server by. With `own_processes` the functions run in
        processes that import it again.
        """
        if own_processes:
            for function in self._functions.values():
                function.app = app
        try:
            repositories, given = self._prepare(self._given)
            yield {**given, "model_repository": repositories}
        finally:
            self._clean()

    def _running(self) -> Engine:
        if self._engine is None:
            raise Unavailable("the server is not running: use `async with` or running()")
        return self._engine

    def _clean(self) -> None:
        self._engine = None
        for function in self._functions.values():
            function.forget()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    @contextmanager
    def running(self, clock: trio.abc.Clock | None = None) -> Iterator[RunningServer]:
        """Runs the server on a thread of its own, for ordinary code; leaving the context drains and ends it.

        `clock`: of the thread's loop, for tests: see neptrio.testing.Clock.

        Raises TritonError when a model cannot be loaded (unless exit_on_error=False), OSError for a port.
        """
        started = self.start(clock)
        try:
            yield started
        finally:
            self.stop()

    def start(self, clock: trio.abc.Clock | None = None) -> RunningServer:
        """running() without a context, for notebooks and frameworks with start and stop hooks: stop() ends it."""
        self._thread = OwnThread(self._once(), clock)
        try:
            self._engine = self._thread.start()
        except BaseException:
            self.stop()
            raise
        return RunningServer(self._engine, self)

    def stop(self) -> None:
        """Ends what start() began: drains, unloads, and returns when the server's thread has ended. Harmless after that."""
        if self._stack is not None:
            raise RuntimeError("the server runs in a context of its own: leave that")
        if self._thread is not None:
            self._thread.stop()
        self._clean()

    async def __aenter__(self) -> Server:
        settings = self._once()
        self._stack = stack = AsyncExitStack()
        stack.callback(self._clean)
        try:
            if sniffio.current_async_library() == "trio":
                nursery = await stack.enter_async_context(trio.open_nursery())
                engine = Engine(settings)
                await nursery.start(engine.run)
            else:
                self._thread = thread = OwnThread(settings)
                stack.push_async_callback(asyncio.to_thread, thread.stop)
                engine = await asyncio.to_thread(thread.start)
        except BaseException as error:
            try:
                await stack.__aexit__(type(error), error, error.__traceback__)
            except BaseExceptionGroup as group:
                raise first_error(group) from None
            raise
        self._engine = engine
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, engine = self._stack, self._engine
        assert stack is not None and engine is not None
        if self._thread is None:
            engine.stop()
        try:
            await stack.__aexit__(None if self._thread is None else kind, error, trace)
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    # ---------------------------------------------------------------- everything else

    async def ready(self) -> bool:
        """Whether the server is ready for requests."""
        return await self._running().reach(control.ready)

    async def metadata(self) -> dict[str, Any]:
        """Name, version and extensions, as GET v2 tells them."""
        return await self._running().reach(control.server_metadata)

    async def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """All models of the repositories with their versions, states and reasons."""
        return await self._running().reach(control.index, ready_only)

    async def load(
        self,
        name: str,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Model:
        """Loads or reloads a model, and returns when it serves. Raises the load's TritonError.

        `config`: a configuration (JSON or a mapping) instead of the model's file; `files`: its content by paths like
        "1/model.onnx", instead of its folder.
        """
        await self._running().reach(control.load, name, config, files)
        return Model(self._running(), name)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service; accepted requests are still answered."""
        await self._running().reach(control.unload, name, unload_dependents)

    async def names(self, name: str) -> dict[str, Any]:
        """A model's version labels and aliases, as GET v2/models/NAME/labels tells them. Raises NotFound."""
        return await self._running().reach(control.names, name)

    async def set_names(
        self,
        name: str,
        labels: Mapping[str, int | None] | None = None,
        aliases: Mapping[str, bool | None] | None = None,
    ) -> dict[str, Any]:
        """Moves version labels to versions and aliases to this model, all at once, and returns names().

        None removes what was set. Raises NotFound, and InvalidArgument for a version that is not there.
        """
        return await self._running().reach(control.set_names, name, labels or {}, aliases or {})

    async def statistics(self, model: str = "", version: str = "", live: bool = False) -> dict[str, Any]:
        """The statistics of one model or of all, as GET v2/models/stats tells them; `live` adds what is queued now."""
        return await self._running().reach(control.statistics, model, version, live)

    async def sequences(self, model: str, version: str = "") -> dict[str, Any]:
        """A stateful model's live sequences."""
        return await self._running().reach(control.sequences, model, version)

    async def trace_settings(
        self, changes: Mapping[str, Any] | None = None, model: str = ""
    ) -> dict[str, Any]:
        """Changes trace settings, of one model or of all, and returns them. Raises InvalidArgument."""
        return await self._running().reach(control.trace_settings, changes or {}, model)

    async def log_settings(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Changes log settings and returns them. Raises InvalidArgument."""
        return await self._running().reach(control.log_settings, changes or {})

    async def metrics(self) -> str:
        """The metrics page, as the metrics port serves it."""
        return await self._running().reach(control.metrics)

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens: "http", "grpc", "metrics" -> "host:port", for those that are switched on."""
        return self._running().addresses


def _repository(where: Repository) -> Repository:
    return storage_uri.resolve(where) if isinstance(where, str) else Path(where)
