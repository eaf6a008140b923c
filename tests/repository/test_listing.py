"""Repositories are listed on worker threads: one on a slow network holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

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
