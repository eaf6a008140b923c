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

from neptrio.errors import InvalidArgument
from neptrio.repository import scan
from neptrio.repository.repositories import Repositories
from neptrio.settings import Settings
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, threading.Event, threading.Event]]:
    """A server whose listing has begun when the first event is set, and ends when the second is."""
    write_model(tmp_path, "m", identity_config())
    begun, go_on = threading.Event(), threading.Event()
    with EmbeddedServer(tmp_path) as server:
        places = server.server.repository.repositories
        listing = places.names

        def slow(*names: str) -> Any:
            begun.set()
            assert go_on.wait(60)
            return listing(*names)

        places.names = slow  # type: ignore[method-assign]
        try:
            yield server, begun, go_on
        finally:
            go_on.set()
            del places.names


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
        places = server.server.repository.repositories
        listing, looking = places.names, places.folders
        threads: list[int] = []

        def listed(*names: str) -> Any:
            threads.append(threading.get_ident())
            return listing(*names)

        def looked(*names: Any) -> Any:
            threads.append(threading.get_ident())
            return looking(*names)

        places.names, places.folders = listed, looked  # type: ignore[method-assign]
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


def test_one_model_is_found_as_in_the_listing_of_all(tmp_path: Path) -> None:
    """Names that no folder can have, hidden folders, files and links are answered alike."""
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    for folder in (first / "both", second / "both", first / "one", second / ".hidden", elsewhere):
        folder.mkdir(parents=True)
    (first / "file").touch()
    (first / "link").symlink_to(elsewhere)
    (first / "circle").symlink_to(first / "circle")
    (second / "nowhere").symlink_to(tmp_path / "nothing")
    places = (first, second, first)
    listed = scan.model_dirs(places)
    assert listed == {
        "both": [first / "both", second / "both"],
        "link": [first / "link"],
        "one": [first / "one"],
    }
    counted = Repositories(Settings(model_repository=places)).names()
    assert list(counted.items()) == [(name, len(folders)) for name, folders in listed.items()]
    names = (
        "file",
        "circle",
        "nowhere",
        ".hidden",
        "",
        ".",
        "..",
        "one/..",
        "a\0b",
        "x" * 300,
        "\udc80",
        "\ud800",
    )
    for name in (*listed, *names):
        assert scan.folders_of(name, places) == listed.get(name, []), name
    missing = (first, tmp_path / "missing")
    with pytest.raises(InvalidArgument) as of_all:
        scan.model_dirs(missing)
    with pytest.raises(InvalidArgument) as of_one:
        scan.folders_of("one", missing)
    assert str(of_one.value) == str(of_all.value)
    assert "failed to open model repository" in str(of_one.value) and "no such folder" in str(of_one.value)
    (tmp_path / "missing").write_text("")
    with pytest.raises(InvalidArgument, match=r"failed to open model repository '.*missing': it is a file"):
        scan.model_dirs(missing)


def test_the_folder_of_traces_is_no_model(tmp_path: Path) -> None:
    """Whoever starts the server in a repository has its traces there; another repository may have a model of that name."""
    for place in ("one", "two"):
        (tmp_path / place / "traces").mkdir(parents=True)
        write_model(tmp_path / place, place, identity_config())
    local = (tmp_path / "one", tmp_path / "two")
    places = Repositories(Settings(model_repository=local, trace_dir=tmp_path / "one" / "traces"))
    other = tmp_path / "two" / "traces"
    assert places.names() == {"one": 1, "traces": 1, "two": 1}
    assert places.model_dirs()["traces"] == places.folders("traces") == [other]
    assert places.names("one") == {"one": 1} and places.folders("traces", "one") == []
    places = Repositories(Settings(model_repository=local[:1], trace_dir=tmp_path / "one" / "traces"))
    assert list(places.model_dirs()) == ["one"]
    with EmbeddedServer(tmp_path / "one", trace_dir=tmp_path / "one" / "traces") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert [row["name"] for row in client.get_model_repository_index()] == ["one"]
