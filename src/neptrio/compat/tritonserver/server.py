"""The server of the interface: neptrio.Server on a thread of its own, started and stopped by methods."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from neptrio.compat.tritonserver import metrics as custom_metrics
from neptrio.compat.tritonserver.enums import MetricFormat, ModelControlMode
from neptrio.compat.tritonserver.errors import (
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
    converting,
)
from neptrio.compat.tritonserver.model import LATEST, Model
from neptrio.compat.tritonserver.options import Options
from neptrio.embedded import control
from neptrio.embedded.engine import OwnThread
from neptrio.embedded.server import Server as EmbeddedServer
from neptrio.logs import FloodFilter, LevelFilter, LineFormat, LogFile
from neptrio.server import Server as CoreServer
from neptrio.settings import Settings

T = TypeVar("T")
NOT_STARTED = "Server not started"
UNLOADED = (None, "UNAVAILABLE")


class ModelDictionary(dict[tuple[str, int], Model]):
    """Models by (name, version). A name alone gives the model whose version the version policy picks."""

    def __init__(self, server: Server, models: list[Model]) -> None:
        super().__init__({(model.name, model.version): model for model in models})
        self._server = server

    def __getitem__(self, key: Any) -> Model:
        if isinstance(key, str) and any(key == name for name, _ in self):
            return Model(self._server, key)
        if key not in self:
            raise KeyError(f"Unknown Model: {key}")
        return super().__getitem__(key)


class Running:
    """A server that has started. Models hold it too."""

    def __init__(self, options: Options) -> None:
        settings, repositories = options._settings(), options._repositories()
        self.mode = options.model_control_mode
        self.metrics = options.metrics
        self._server = EmbeddedServer(repositories, **settings)
        try:
            made = self._server._once()
        except ValueError as error:
            self._server._clean()
            raise InvalidArgumentError(str(error)) from None
        self._log = _start_log(made) if options.logs or options.log_file else None
        self._thread = OwnThread(made)
        try:
            with converting():
                self.engine = self._thread.start()
        except BaseException:
            self._end()
            raise
        self._registry = self.engine.core.verbs.custom_metrics
        custom_metrics.serving(self._registry)

    def ask(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of a function on the server's loop. Raises this interface's errors."""
        with converting():
            return self.engine.ask(function, *args)

    def stop(self) -> None:
        """Answers what is accepted, unloads, and ends the thread."""
        custom_metrics.stopped(self._registry)
        if (
            self.engine.here
        ):  # the last reference went on the server's own thread, which cannot wait for itself
            self.engine.stop()
            return
        self._thread.stop()
        self._end()

    def _end(self) -> None:
        self._server._clean()
        if self._log is not None:
            logging.getLogger("neptrio").removeHandler(self._log)
            self._log.close()


def _start_log(settings: Settings) -> logging.Handler:
    """Sends the server's log to a file or to stderr, and leaves the program's own logging alone."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if settings.log_file:
        handler = LogFile(settings.log_file, handler)
    handler.setFormatter(LineFormat(settings.log_format == "ISO8601"))
    handler.addFilter(LevelFilter(settings))
    handler.addFilter(FloodFilter())
    logger = logging.getLogger("neptrio")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if settings.log_verbose else logging.INFO)
    return handler


async def _poll(core: CoreServer) -> None:
    await core.repository.poll_once()


class Server:
    """An inference server in this process. `options`, or their fields as keywords; start() checks them."""

    def __init__(self, options: Options | None = None, **kwargs: Any) -> None:
        self.options = Options(**kwargs) if options is None else options
        self._started: Running | None = None
        self._finalizer: weakref.finalize | None = None

    def _running(self) -> Running:
        if self._started is None:
            raise InvalidArgumentError(NOT_STARTED)
        return self._started

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Starts the server, and loads the models that the model control mode says.

        `wait_until_ready`: returns when all of them serve, asking every `polling_interval` seconds, for up to `timeout`
        seconds.

        Raises InvalidArgumentError, TypeError or UnsupportedError for an option, InternalError when a model cannot
        be loaded (unless exit_on_error=False), UnavailableError after `timeout`.
        """
        if self._started is not None:
            raise InvalidArgumentError("Server already started")
        self._started = running = Running(self.options)
        # a program may end, or forget the server, without stop(): models are unloaded then too
        self._finalizer = weakref.finalize(self, running.stop)
        end = None if timeout is None else time.monotonic() + timeout
        while wait_until_ready and not self.ready():
            if end is not None and time.monotonic() >= end:
                raise UnavailableError("Timeout before ready")
            time.sleep(polling_interval)
        return self

    def stop(self) -> None:
        """Answers the requests that were accepted, unloads all models and ends. It may be started again."""
        self._running()
        assert self._finalizer is not None
        self._finalizer()
        self._started = self._finalizer = None

    def live(self) -> bool:
        """Whether the server answers."""
        return self._running().ask(_live)

    def ready(self) -> bool:
        """Whether the server is ready for requests, as the health probe tells it."""
        return self._running().ask(control.ready)

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions."""
        return self._running().ask(control.server_metadata)

    def model(self, model_name: str, model_version: int = LATEST) -> Model:
        """A model by its name. It need not be loaded yet."""
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """All models of the repositories, with their states and reasons."""
        found = self._running().ask(control.index, exclude_not_ready)
        return ModelDictionary(
            self,
            [
                Model(
                    self,
                    model["name"],
                    int(model.get("version") or LATEST),
                    model.get("state") or None,
                    model.get("reason") or None,
                )
                for model in found
            ],
        )

    def load(self, model_name: str, parameters: dict[str, str | int | bool | bytes] | None = None) -> Model:
        """Loads or reloads a model, and returns when it serves. For ModelControlMode.EXPLICIT.

        `parameters`: "config" is a configuration as JSON instead of the model's file; "file:PATH" is the content of a
        file instead of the model's folder. Raises the load's error.
        """
        running = self._explicit()
        given = dict(parameters or {})
        config: Any = given.pop("config", None)
        files = {name: value for name, value in given.items() if isinstance(value, bytes)}
        left = set(given) - set(files)
        if left:
            raise InvalidArgumentError(f"load has no parameter '{min(left)}', expected config or file:PATH")
        running.ask(control.load, model_name, config, files)
        return self.model(model_name)

    def unload(
        self,
        model: str | Model,
        unload_dependents: bool = False,
        wait_until_unloaded: bool = False,
        polling_interval: float = 0.1,
        timeout: float | None = None,
    ) -> None:
        """Takes a model out of service; accepted requests are still answered. For ModelControlMode.EXPLICIT.

        `wait_until_unloaded`: returns when they are, or after `timeout` seconds.
        """
        running = self._explicit()
        name = model if isinstance(model, str) else model.name
        running.ask(control.unload, name, unload_dependents)
        end = None if timeout is None else time.monotonic() + timeout
        while wait_until_unloaded and self._loaded(name) and (end is None or time.monotonic() < end):
            time.sleep(polling_interval)

    def _loaded(self, name: str) -> bool:
        return any(m.state not in UNLOADED for (found, _), m in self.models().items() if found == name)

    def _explicit(self) -> Running:
        running = self._running()
        if running.mode != ModelControlMode.EXPLICIT:
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled, or without "
                "model_control_mode=ModelControlMode.EXPLICIT"
            )
        return running

    def poll_model_repository(self) -> None:
        """Loads models that are new or have changed, unloads those that are gone. For ModelControlMode.POLL."""
        running = self._running()
        if running.mode != ModelControlMode.POLL:
            raise UnavailableError("polling needs model_control_mode=ModelControlMode.POLL")
        running.ask(_poll)

    def register_model_repository(
        self, repository_path: str, name_mapping: dict[str, str] | None = None
    ) -> None:
        """Not supported: the repositories are those of the options."""
        self._running()
        raise UnsupportedError("repositories cannot be added to a running server: name them all in Options")

    def unregister_model_repository(self, repository_path: str) -> None:
        """Not supported."""
        self._running()
        raise UnsupportedError("repositories cannot be taken from a running server: unload the models")

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """The metrics page, custom metrics included. Raises UnsupportedError with the option metrics=False."""
        running = self._running()
        if not running.metrics:
            raise UnsupportedError("metrics are switched off: the server was started with metrics=False")
        MetricFormat(metric_format)
        return running.ask(control.metrics)


async def _live(_: CoreServer) -> bool:
    return True
