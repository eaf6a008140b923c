"""What is looked at only where something has changed is what looking at everything would find."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.frontend.model_table import ModelTable
from neptrio.repository import version_states
from neptrio.repository.notifier import REMEMBERED
from tests.client.test_ensembles import ENSEMBLE
from tests.support.control import CONFIG
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model

VERSIONS = "version_policy { all { } }"
BROKEN = json.dumps({"backend": "nosuch"})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    for name in ("first", "second"):
        write_model(tmp_path, name, identity_config(extra=VERSIONS))
    (tmp_path / "second" / "3").mkdir()
    write_model(tmp_path, "ens", ENSEMBLE)
    with EmbeddedServer(tmp_path, model_control_mode="explicit") as running:
        yield running


class Looked:
    """A table of models, and what a front end that is sent its parts knows."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._catalog = server.server.repository
        self._table = ModelTable(self._catalog)
        self.known: dict[str, Any] = {}
        self.parts: list[list[str]] = []

    def look(self) -> None:
        """Checks both against everything. On the server's thread."""
        catalog = self._catalog
        assert catalog.all_ready() == all(
            version_states.keeps_ready(row.state, row.reason) and (row.model is None or row.model.ready)
            for record in catalog.records.values()
            for row in record.rows.values()
        )
        self.parts.append(self._table.renew())
        self.known.update(json.loads(self._table.document(self.parts[-1])))
        fresh = ModelTable(catalog)
        fresh.renew()
        whole = json.loads(fresh.document())
        assert {name: rows for name, rows in self.known.items() if rows} == whole
        assert json.loads(self._table.document()) == whole
        assert whole == {
            name: [
                {
                    "version": model.version,
                    "labels": [],
                    "latest": catalog.latest[name] is model,
                    "decoupled": False,
                    "max_batch_size": model.max_batch_size,
                    "inputs": [
                        [spec.name, spec.dtype, list(spec.dims), spec.optional, spec.ragged]
                        for spec in model.input_specs
                    ],
                }
                for model in catalog.each_ready([name])
            ]
            for name in catalog.latest
        }


def operate(client: httpclient.InferenceServerClient, chance: random.Random) -> None:
    name = chance.choice(("first", "second", "ens", "nobody"))
    what = chance.choice(("load", "load", "unload", "dependents", "config", "batch", "broken"))
    try:
        if what == "load":
            client.load_model(name)
        elif what in ("unload", "dependents"):
            client.unload_model(name, unload_dependents=what == "dependents")
        elif what == "config":
            client.load_model(name, config=json.dumps({**CONFIG, "instance_group": [{"count": 2}]}))
        elif what == "batch":
            client.load_model(name, config=json.dumps({**CONFIG, "max_batch_size": chance.randrange(2, 9)}))
        else:
            client.load_model(name, config=BROKEN)
    except InferenceServerException:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(server: EmbeddedServer, seed: int) -> None:
    looked = Looked(server)
    chance = random.Random(seed)
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(40):
            for _ in range(chance.choice((1, 1, 1, 3))):
                operate(client, chance)
            server.ask(looked.look)
    assert any(looked.parts)


def test_only_what_has_changed_is_told(server: EmbeddedServer) -> None:
    looked = Looked(server)
    with httpclient.InferenceServerClient(server.http) as client:
        for name in ("first", "ens"):
            client.load_model(name)
        server.ask(looked.look)
        client.load_model("first")  # nothing has changed, and nothing is done
        server.ask(looked.look)
        client.load_model("second", config=json.dumps({**CONFIG, "max_batch_size": 16}))
        server.ask(looked.look)
        client.unload_model("first")  # and the ensemble with it
        server.ask(looked.look)
    assert looked.parts == [["ens", "first", "second"], [], ["second"], ["ens", "first"]]


def test_more_changes_than_are_remembered(server: EmbeddedServer) -> None:
    looked = Looked(server)
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model("first")
        server.ask(looked.look)
        client.load_model("second")
        with pytest.raises(InferenceServerException):
            client.load_model("second", config=BROKEN)

        def ring() -> None:
            for _ in range(REMEMBERED + 1):
                server.server.repository.readiness.notify("first")

        server.ask(ring)
        server.ask(looked.look)
        assert looked.parts[-1] == ["second"]
        client.unload_model("second")
        server.ask(ring)
        server.ask(looked.look)
        assert looked.parts[-1] == ["second"]
