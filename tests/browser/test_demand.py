"""What the console shows of models that are loaded on demand, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import browser
from tests.support.browser import Chromium
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

NAMES = [name for name in browser.installed() if name in browser.CHROMIUM]
pytestmark = [
    pytest.mark.skipif(not NAMES, reason="no chromium on PATH: the console is not drawn"),
    pytest.mark.slow,
]
READY = "Number(document.documentElement.dataset.rounds || 0) >= 2"
FACTS = "document.querySelector('.demand dl').innerText"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name in ("asked", "waits", "gone"):
        write_model(repository, name, identity_config(pairs=1))
    write_model(repository, "broken", 'backend: "identity" max_batch: 3')
    flags = "--model-control-mode=on-demand", "--model-memory-budget=2GiB"
    with ServerProcess(repository, *flags, failures="max_batch") as process:
        yield process


@pytest.fixture
def tab() -> Iterator[Chromium]:
    made = browser.start(NAMES[0])
    assert isinstance(made, Chromium)
    try:
        made.look(1280, 900)
        yield made
    finally:
        made.close()


def ask(server: ServerProcess, path: str, status: int = 200) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16}]}
    with Http1(server.http) as client:
        assert client.request("POST", path, json.dumps(body).encode()).status == status


def rows(table: str) -> str:
    """The texts of a table's rows, as an expression."""
    return f"[...document.querySelectorAll('{table} tbody tr:not(.under)')].map(r => [...r.cells].map(c => c.textContent))"


def test_models_on_demand_have_a_panel(tab: Chromium, server: ServerProcess) -> None:
    for _ in range(3):
        ask(server, "/v2/models/asked/infer")
    ask(server, "/v2/models/gone/infer")
    ask(server, "/v2/repository/models/gone/unload")
    ask(server, "/v2/models/broken/infer", 503)
    tab.visit(f"http://{server.metrics}/console/#", READY)
    tab.wait("document.querySelectorAll('.demand tbody tr').length === 3")
    shown = tab.evaluate(rows(".demand"))
    assert [row[:8] for row in shown] == [
        ["broken", "failed", "0", "0", "1", "0", "1", "0"],
        ["asked", "loaded", "0", "2", "1", "1", "0", "0"],
        ["gone", "put away", "0", "0", "1", "1", "0", "0"],
    ]
    assert "max_batch" in shown[0][8]
    facts = tab.evaluate(FACTS)
    for text in (
        "1 failed, 1 loaded, 1 put away, 1 on demand",
        "of 2.0 GiB",
        "2 (40 %)",
        "0 requests",
        "1 failed",
    ):
        assert text in facts, facts
    # those that wait to be asked for are not among those that should serve, and are found by name
    names = f"{rows('.models')}.map(r => r[0])"
    assert sorted(tab.evaluate(names)) == ["asked", "broken"]
    search = "document.querySelector('.card input[type=search]')"
    tab.evaluate(f"(s => {{ s.value = 'wait'; s.dispatchEvent(new Event('input')); }})({search})")
    tab.wait(f"{names}.join() === 'waits'")
    assert tab.evaluate(f"{rows('.models')}[0][2]") == "on demand"
    assert not tab.messages, "nothing failed, and no rule of the page was broken"
