"""A server for one test: models, functions and fakes, in this process, with clients bound to it."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from neptrio.embedded.blocking import BlockingModel, RunningServer
from neptrio.embedded.response import Response
from neptrio.embedded.server import Server, takes_settings
from neptrio.embedded.server_settings import ServerSettings
from neptrio.testing.clock import Clock
from neptrio.testing.fake_model import PATIENCE, FakeModel


class TestServer:
    """A running server, to be used with `with`. `server` is its RunningServer, whose methods it has too.

    `what`: fake models, functions or classes (as for Server.function()), and folders of models; `clock`: the test's, by
    default one of its own; `settings`: as for neptrio.Server.
    """

    __test__ = False  # no class of tests, whatever its name says

    @takes_settings
    def __init__(self, *what: Any, clock: Clock | None = None, **settings: Unpack[ServerSettings]) -> None:
        self.clock = clock or Clock()
        self._stack = ExitStack()
        self._made = Server([each for each in what if isinstance(each, (str, Path))], **settings)
        self._fakes = [each for each in what if isinstance(each, FakeModel)]
        for each in what:
            if isinstance(each, FakeModel):
                each.clock = self.clock
                each.tester = threading.get_ident()
                self._made._functions[each.name] = each.model
            elif not isinstance(each, (str, Path)):
                self._made.function(each)
        self.server: RunningServer

    def __enter__(self) -> TestServer:
        with ExitStack() as stack:
            self.server = stack.enter_context(self._made.running(self.clock))
            self.clock.wakes(self.server._engine)
            for fake in self._fakes:
                stack.callback(fake.release_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getattr__(self, name: str) -> Any:
        if name == "server":
            raise AttributeError("the server has not been started: use it with `with`")
        return getattr(self.server, name)

    def model(self, name: str, version: str = "") -> BlockingModel:
        """A model of this server."""
        return self.server.model(name, version)

    def infer(self, model: str, **inputs: Any) -> Response:
        """The response of a model to inputs by name."""
        return self.model(model).infer(inputs)

    def until_queued(self, model: str, requests: int = 1) -> None:
        """Waits until that many requests wait for the model, in its queue or in a batch for a busy instance. Raises TimeoutError after a minute of real time."""
        self._until("queued", model, requests)

    def until_idle(self, model: str) -> None:
        """Waits until the model has no request. Raises TimeoutError after a minute of real time."""
        self._until("", model, 0)

    def _until(self, what: str, model: str, requests: int) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            live = self.server.statistics(model, live=True)["model_stats"][0]["live"]
            waiting = live["queued"] + live["prepared"]  # a prepared batch waits for its instance
            if waiting >= requests if what else not waiting and not live["executing"]:
                return
            if time.monotonic() > end:
                raise TimeoutError(
                    f"model '{model}' has {waiting} requests that wait and {live['executing']} in execution, expected "
                    f"{f'{requests} that wait' if what else 'none'}"
                )

    def http_client(self, **options: Any) -> Any:
        """A tritonclient.http.InferenceServerClient of this server, closed with it. Needs http_port=0 and tritonclient."""
        from tritonclient.http import InferenceServerClient  # type: ignore[import-untyped]

        return self._client(InferenceServerClient, "http", options)

    def grpc_client(self, **options: Any) -> Any:
        """A tritonclient.grpc.InferenceServerClient of this server, closed with it. Needs grpc_port=0 and tritonclient."""
        from tritonclient.grpc import InferenceServerClient  # type: ignore[import-untyped]

        return self._client(InferenceServerClient, "grpc", options)

    def _client(self, made: Any, port: str, options: dict[str, Any]) -> Any:
        address = self.server.addresses.get(port)
        if address is None:
            raise RuntimeError(f"the server has no {port} port: start it with {port}_port=0")
        client = made(address, **options)
        self._stack.callback(client.close)
        return client
