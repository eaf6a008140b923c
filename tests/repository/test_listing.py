"""Repositories are listed on worker threads: one on a slow network holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, threading.Event, threading.Event]]:
    """A server whose listing has begun when the first event is set, and ends when the second is."""
    write_model(tmp_path, "m", identity_config())
    begun, go_on = threading.Event(), threading.Event()
    with EmbeddedServer(tmp_path) as server:
        places = server.server.repository.places
        listing = places.model_dirs

        def slow() -> Any:
            begun.set()
            assert go_on.wait(60)
            return listing()

        places.model_dirs = slow  # type: ignore[method-assign]
        try:
            yield server, begun, go_on
        finally:
            go_on.set()
            del places.model_dirs


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_others_are_answered_while_the_index_is_made(held: Any, protocol: str) -> None:
    server, begun, go_on = held
    http = "{}:{}".format(*server.server.http_listener.getsockname())
    grpc = "{}:{}".format(*server.server.grpc_listener.getsockname())
    rows: list[Any] = []

    def index() -> None:
        if protocol == "http":
            with httpclient.InferenceServerClient(http) as client:
                rows.extend(client.get_model_repository_index())
        else:
            with grpcclient.InferenceServerClient(grpc) as client:
                rows.extend(client.get_model_repository_index(as_json=True)["models"])

    asking = threading.Thread(target=index)
    asking.start()
    assert begun.wait(60)
    with httpclient.InferenceServerClient(http) as client:
        assert client.is_server_live() and client.is_model_ready("m")
    assert not rows
    go_on.set()
    asking.join()
    assert [(row["name"], row["state"]) for row in rows] == [("m", "READY")]


def test_failed_loads_list_nothing_on_the_trio_thread(tmp_path: Path) -> None:
    """The index tells why a model of a repository did not load; a stranger leaves no trace."""
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "typing", 'backend: "identity" max_batch_size: ')
    write_model(tmp_path, "broken", 'backend: "nonesuch"')
    with EmbeddedServer(tmp_path, exit_on_error=False, model_control_mode="explicit") as server:
        places = server.server.repository.places
        listing = places.model_dirs
        threads: list[int] = []

        def seen() -> Any:
            threads.append(threading.get_ident())
            return listing()

        places.model_dirs = seen  # type: ignore[method-assign]
        with httpclient.InferenceServerClient(server.http) as client:
            for name in ("stranger", "typing", "broken"):
                with pytest.raises(InferenceServerException):
                    client.load_model(name)
            for name in ("stranger", "m"):
                with pytest.raises(InferenceServerException):
                    client.load_model(name, config="{", files={"file:1/x": b"x"})
            rows = {row["name"]: row for row in client.get_model_repository_index()}
        assert len(threads) >= 6
        assert server.ask(threading.get_ident) not in threads
        assert {name: row["state"] for name, row in rows.items()} == {
            "broken": "UNAVAILABLE",
            "m": "UNAVAILABLE",
            "typing": "UNAVAILABLE",
        }
        assert "nonesuch" in rows["broken"]["reason"] and "config.pbtxt:1" in rows["typing"]["reason"]
        assert "load parameter 'config'" in rows["m"]["reason"]
        assert server.ask(lambda: set(server.server.repository.records)) == {"m", "broken", "typing"}
