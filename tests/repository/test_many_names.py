"""What is asked of a server with thousands of models of which few are loaded looks at those few, and says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.codec.http_json import dump_json
from neptrio.errors import NotFound
from neptrio.service.statistics import Detail
from tests.support.control import infer
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model

LOADED = {"a-loaded", "z-loaded"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Models that are loaded, were loaded, failed to, and were never asked for."""
    repository = tmp_path_factory.mktemp("many")
    for name in ("away", *LOADED, *(f"idle{i}" for i in range(5))):
        write_model(repository, name, identity_config(), versions=(1, 2))
    write_model(repository, "broken", 'backend: "nonesuch"')
    with EmbeddedServer(repository, model_control_mode="on-demand") as running:
        with httpclient.InferenceServerClient(running.http) as client:
            for name in ("z-loaded", "away", "a-loaded"):
                infer(client, name)
            client.unload_model("away")
            with pytest.raises(InferenceServerException, match="nonesuch"):
                infer(client, "broken")
        yield running


class Asked:
    """A function of one name that notes what it is asked for."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.names: list[str] = []

    def __call__(self, name: str, *more: Any) -> Any:
        self.names.append(name)
        return self._function(name, *more)


def test_the_index_of_ready_models(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is made of a model that waits to be loaded, only to be left out: whoever cuts the index could not rest there."""
    catalog, service = server.server.repository, server.server.verbs.repository
    assert catalog.demand is not None
    asked = Asked(catalog.demand.rows)
    monkeypatch.setattr(catalog.demand, "rows", asked)

    async def ask(ready: bool) -> tuple[list[Any], list[Any], list[bytes]]:
        return (
            await service.index(ready),
            list(await service.index_rows(ready, timings=True)),
            list(await service.index_texts(ready, "json", dump_json)),
        )

    every = server.run(ask, False)
    assert len(set(asked.names)) == 9
    asked.names.clear()
    found = server.run(ask, True)
    assert set(asked.names) == LOADED
    for rows, those in zip(every[:2], found[:2], strict=True):
        assert those == [row for row in rows if row.get("state") == "READY"]
    assert [(row["name"], row["version"]) for row in found[0]] == [("a-loaded", "2"), ("z-loaded", "2")]
    assert found[2] == [dump_json(row) for row in found[0]]


def test_the_statistics_of_all_models(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that are loaded, only those are looked at that have counted something."""
    catalog, service = server.server.repository, server.server.verbs.statistics
    assert catalog.demand is not None
    away = Asked(catalog.demand.away)
    monkeypatch.setattr(catalog.demand, "away", away)
    found = server.ask(service.model_statistics, "", "", Detail(live=True))
    assert [(row["name"], row["version"], row["inference_count"]) for row in found["model_stats"]] == [
        ("a-loaded", "2", 1),
        ("z-loaded", "2", 1),
        ("away", "2", 1),
    ]
    assert away.names == ["away"]
    told = found["on_demand"]
    assert told["states"] == {"failed": 1, "loaded": 2, "on demand": 5, "put away": 1}
    assert [row["name"] for row in told["models"]] == ["a-loaded", "away", "broken", "z-loaded"]


def test_what_is_told_of_one_model(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is listed for it; a folder is looked for only where nothing is known of it."""
    catalog = server.server.repository
    listed, looked_for = Asked(None), Asked(catalog.repositories.folders)
    monkeypatch.setattr(catalog.repositories, "names", listed)
    monkeypatch.setattr(catalog.repositories, "folders", looked_for)
    told = server.run(catalog.progress, "idle0")
    assert told["versions"] == [] and told["on_demand"]["state"] == "on demand"
    assert server.run(catalog.progress, "away")["on_demand"]["state"] == "put away"
    (row,) = server.run(catalog.progress, "a-loaded")["versions"]
    assert row["state"] == "READY" and not looked_for.names
    (catalog.repositories.select("")[0][0] / "new" / "1").mkdir(parents=True)
    assert server.run(catalog.progress, "new") == {"name": "new", "versions": []}
    assert server.run(catalog.told_names, "new")["versions"] == []
    for name in ("stranger", "..", "x" * 300):
        with pytest.raises(NotFound, match="is not found"):
            server.run(catalog.progress, name)
    assert looked_for.names == ["new", "new", "stranger", "..", "x" * 300] and not listed.names
