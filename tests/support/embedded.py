"""A whole server inside the test process, with real sockets, so that a test can look into its objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import trio

from neptrio.server import Server
from neptrio.settings import Settings
from neptrio.transport.grpc.server import GrpcServer
from tests.support.waiting import until_trio

T = TypeVar("T")


@dataclass(frozen=True)
class GrpcHeld:
    """What all gRPC connections of a server hold."""

    open_calls: int
    parked_calls: int
    unsent_reply_bytes: int
    unfinished_request_bytes: int
    in_place_bytes: int  # of large messages, received where they lie without passing the shared buffer
    inflated_bytes: int


class EmbeddedServer:
    """`grpc` and `http` are "127.0.0.1:PORT"; ask() runs a function on the server's trio thread."""

    def __init__(self, repository: Path, session: str | None = None, **settings: Any) -> None:
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._session = session
        self._settings = Settings(
            model_repository=(repository,),
            http_address="127.0.0.1",
            http_port=0,
            grpc_address="127.0.0.1",
            grpc_port=0,
            **{"metrics_port": 0, **settings},
        )
        self._thread = threading.Thread(target=self._run, name="embedded-server")
        self._thread.start()
        assert self._started.wait(60), "the server did not start"
        if self._error is not None:
            raise self._error
        self.grpc = "{}:{}".format(*self.server.grpc_listener.getsockname()[:2])  # type: ignore[union-attr]
        self.http = "{}:{}".format(*self.server.http_listener.getsockname()[:2])  # type: ignore[union-attr]

    def _run(self) -> None:
        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            before = os.environ.get("NEPTRIO_HTTP2_SESSION")
            if self._session is not None:
                os.environ["NEPTRIO_HTTP2_SESSION"] = self._session

            def started() -> None:
                if before is None:
                    os.environ.pop("NEPTRIO_HTTP2_SESSION", None)
                else:
                    os.environ["NEPTRIO_HTTP2_SESSION"] = before
                self._started.set()

            self.server = Server(self._settings)
            await self.server.serve(started)

        try:
            trio.run(main)
        except BaseException as error:
            self._error = error
            self._started.set()

    def ask(self, function: Callable[..., T], *args: Any) -> T:
        """Returns `function(*args)`, called on the server's trio thread."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Returns `await function(*args)`, awaited on the server's trio thread."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    @property
    def grpc_server(self) -> GrpcServer:
        """The gRPC server object."""
        return next(front for front in self.server.fronts if isinstance(front, GrpcServer))

    def grpc_held(self) -> GrpcHeld:
        """What all gRPC connections hold now. On the trio thread only."""
        held = list(self.grpc_server.open)
        accounts = [connection.session.account for connection in held]
        return GrpcHeld(
            open_calls=sum(len(connection.session.streams) for connection in held),
            parked_calls=sum(len(connection.parked) for connection in held),
            unsent_reply_bytes=sum(a.out_bytes + a.held for a in accounts)
            + sum(connection.writer.pending for connection in held),
            unfinished_request_bytes=sum(a.in_bytes for a in accounts),
            in_place_bytes=sum(a.placed for a in accounts),
            inflated_bytes=self.server.services.inflating.held,
        )

    def inflight(self) -> int:
        """The number of accepted, unanswered requests of all models."""
        return sum(model.inflight for model in self.server.repository.ready_models())

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Waits until `condition()` is true on the trio thread; AssertionError after `timeout` seconds."""

        def told() -> str:
            return f"{what}; {self.grpc_held()}"

        trio.from_thread.run(until_trio, condition, told, timeout, trio_token=self._token)

    def until_idle(self) -> None:
        """Waits until nothing is under way: no request, no call, no unsent byte."""

        def idle() -> bool:
            s = self.grpc_held()
            return not (
                self.inflight()
                or s.open_calls
                or s.parked_calls
                or s.unsent_reply_bytes
                or s.unfinished_request_bytes
                or s.inflated_bytes
            )

        self.until(idle, "idle")

    def stop(self) -> None:
        """Drains and ends the server."""
        if self._thread.is_alive():
            try:
                self.ask(self.server.stop)
            except trio.RunFinishedError:
                pass
        self._thread.join(300)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._error is not None:
            raise self._error

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
