"""What the console shows of failures, in a real browser: the errors that requests met, the log, charts of what was when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser.panels import BROKEN, ROUNDS, TEXT, cell, click, fill, infer, show
from tests.support.browser import Chromium
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ERRORS = "[...document.querySelectorAll('.errors tbody tr')]"
ROWS = f"{ERRORS}.map(r => Object.fromEntries([...r.cells].map(c => [c.dataset.name, c.textContent])))"
LINES = "[...document.querySelectorAll('.log div')]"


def fail(server: ServerProcess, model: str, length: int, times: int = 1, name: str = "IN") -> None:
    tensor = {"name": name, "shape": [length], "datatype": "INT32", "data": [0] * length}
    with Http1(server.http) as client:
        for _ in range(times):
            body = json.dumps({"inputs": [tensor]}).encode()
            assert client.request("POST", f"/v2/models/{model}/infer", body).status >= 400


def test_the_errors_that_requests_met(tab: Chromium, server: ServerProcess) -> None:
    fail(server, "fails", 4, 3)
    fail(server, "fails", 3)
    show(tab, server)
    tab.wait(f"{ERRORS}.length >= 2")
    refused, failed = tab.evaluate(ROWS)[:2]
    assert (failed["Model"], failed["Error"], failed["Requests"]) == ("fails", BROKEN, "failed")
    assert int(failed["Count"]) >= 3 and failed["Last"].endswith(("just now", "ago"))
    assert refused["Requests"] == "refused" and "unexpected shape for input 'IN'" in refused["Error"]
    bad = f"{ERRORS}.map(r => r.querySelector('[data-name=Error]').classList.contains('bad'))"
    assert tab.evaluate(bad)[:2] == [False, True], "what the model did is red, what a client did is not"
    assert tab.evaluate(cell("fails", "State")) == "ready, most requests fail"
    assert tab.evaluate("document.querySelectorAll('main script, main style').length") == 0
    click(tab, "fails", "document.querySelector('.errors')")
    tab.wait(f"location.hash === '#models/fails/1' && {ERRORS}.length === 2")
    assert [row["Error"] for row in tab.evaluate(ROWS)] == [refused["Error"], BROKEN]
    show(tab, server, "models/simple/1")
    tab.wait(f"{TEXT}.includes('No request has failed since the load.')")


def test_the_log(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server)
    tab.press("4")
    tab.wait(f"location.hash === '#log' && {LINES}.length > 0")
    fail(server, "fails", 4)
    said = f"{LINES}.filter(e => e.className === 'level-warning' && e.textContent.includes({json.dumps(BROKEN)}))"
    tab.wait(f"{said}.length > 0")
    before = tab.evaluate(f"{LINES}.length")
    fill(tab, "select[aria-label=Level]", "warnings and errors")
    assert 0 < tab.evaluate(f"{LINES}.length") < before
    fill(tab, "input[type=search]", "UNABLE to be found")
    assert tab.evaluate(f"{LINES}.length") == 0
    fill(tab, "input[type=search]", "")
    fill(tab, "select[aria-label=Level]", "all levels")
    assert tab.evaluate(
        "(e => e.scrollHeight - e.scrollTop - e.clientHeight < 4)(document.querySelector('.log'))"
    )
    assert tab.evaluate("document.querySelectorAll('main script, main style').length") == 0


def test_a_chart_has_times_and_shows_values_under_the_pointer(tab: Chromium, server: ServerProcess) -> None:
    infer(server, "simple", 5)
    show(tab, server, "models/simple/1")
    tab.wait("document.querySelector('.line-0').getAttribute('d').includes('L')")
    marks = "[...document.querySelector('.axis').children].map(e => e.textContent)"
    assert tab.evaluate(marks) == ["−45 s", "−30 s", "−15 s", "now"]
    assert tab.evaluate("document.querySelector('.tip').hidden") is True
    tab.evaluate(
        "(e => { const b = e.getBoundingClientRect(); e.dispatchEvent(new PointerEvent('pointermove', "
        "{clientX: b.right - 1, clientY: b.top + 5, bubbles: true})); })(document.querySelector('.plot'))"
    )
    tip = "document.querySelector('.tip').innerText.split('\\n')"
    when, answered, failed = tab.evaluate(tip)
    assert ":" in when and answered.startswith("answered ") and failed == "failed 0/s"
    assert tab.evaluate("document.querySelector('.cursor').getAttribute('d')").startswith("M300.0")
    tab.evaluate("document.querySelector('.plot').dispatchEvent(new PointerEvent('pointerleave'))")
    assert tab.evaluate("document.querySelector('.tip').hidden") is True
    # the same by keyboard: from the latest moment backwards
    tab.evaluate("document.querySelector('.plot').focus()")
    tab.press("ArrowLeft", "ArrowLeft")
    tab.wait("!document.querySelector('.tip').hidden")
    at = tab.evaluate("document.querySelector('.cursor').getAttribute('d')")
    assert at.startswith("M") and not at.startswith("M300")
    failing = "getComputedStyle(document.querySelectorAll('.legend .swatch')[1]).backgroundColor"
    assert tab.evaluate(failing) == "rgb(194, 39, 52)", "failures are red"


def test_an_ensemble_shows_its_graph_with_times_by_step(tab: Chromium, server: ServerProcess) -> None:
    fail(server, "chain", 4, 3, "A")
    show(tab, server, "models/chain/1")
    boxes = "[...document.querySelectorAll('.graph g, .graph a')].map(e => [...e.querySelectorAll('text')].map(t => t.textContent))"
    tab.wait(f"{boxes}.length === 4 && {boxes}[2][1].includes('failed')")
    request, first, second, answer = tab.evaluate(boxes)
    assert (request, answer) == (["request", "A"], ["answer", "B"])
    assert first[0] == "1. apart" and "p99" in first[1] and "failed" not in first[1]
    assert second[0] == "2. fails" and int(second[1].split(", ")[1].split()[0]) >= 3
    assert tab.evaluate(
        "[...document.querySelectorAll('.graph .node')].map(e => e.classList.contains('bad'))"
    ) == [
        False,
        False,
        True,
        False,
    ]
    flows = "[...document.querySelectorAll('.graph .edge title')].map(e => e.textContent)"
    assert sorted(tab.evaluate(flows)) == ["A", "B", "M"]
    rows = "[...document.querySelectorAll('[aria-label=Steps] tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    (one, two) = tab.evaluate(rows)
    assert one[0] == "1. apart" and int(one[6]) >= 3 and one[7] == "0" and one[3] != "–"
    assert two[0] == "2. fails" and two[6] == "0" and int(two[7]) >= 3
    tab.evaluate("document.querySelector('.graph a').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    tab.wait("location.hash === '#models/apart/'")
    show(tab, server, "models/simple/1")
    tab.wait(f"{TEXT}.includes('by the server')")
    assert tab.evaluate("document.querySelector('.graph').checkVisibility()") is False


@pytest.mark.slow
def test_what_cannot_be_done_is_not_offered(started: Chromium, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    flags = ("--admin-address=127.0.0.1:0",)
    with ServerProcess(tmp_path / "models", *flags) as server:
        show(started, server)
        only_there = "is served at the admin address only"
        started.wait(f"{TEXT}.includes({json.dumps(only_there)})")
        started.wait(f"{cell('simple', 'State')} === 'ready'")
        started.wait(f"{ROUNDS} >= 5")
        asked = [
            url for url in started.network if url.endswith("/console/v2/errors") and server.metrics in url
        ]
        assert len(asked) == 1, "an audit log has every refusal"
        # mode none: there is nothing to load or to unload
        started.wait("!document.querySelector('.models button')")
        show(started, server, "models/simple/1")
        started.wait(f"{TEXT}.includes('Configuration')")
        assert started.evaluate("[...document.querySelectorAll('.heading button')].length") == 0
        show(started, server, "settings")
        started.wait(f"{TEXT}.includes('this server has none')")
        assert (
            started.evaluate("[...document.querySelectorAll('[aria-label=Repository] button')].length") == 0
        )
        assert started.evaluate("document.querySelector('form.inline').checkVisibility()") is False
        show(started, server, "log")
        started.wait(f"{TEXT}.includes({json.dumps(only_there)})")
