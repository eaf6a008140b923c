"""The console in a real browser against a real server: every panel, hostile names, tokens, small and dark screens."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.browser.panels import BROKEN, HOSTILE, READY, TEXT, cell, click, fill, infer, send, show
from tests.support.browser import Chromium
from tests.support.held_port import held_port
from tests.support.http import Http1
from tests.support.metrics import scrape, value
from tests.support.server import FRONTENDS, ServerProcess
from tests.support.waiting import until
from tests.transport.test_tokens import FILE


def test_what_needs_attention_comes_first(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server)
    first = "document.querySelector('.models tbody tr')"
    tab.wait(f"{first}?.cells[0].textContent === 'broken'")
    assert tab.evaluate(f"{first}.querySelector('.badge').classList.contains('bad')")


def test_a_configuration_can_be_copied_and_load_is_there_in_mode_explicit(
    tab: Chromium, server: ServerProcess
) -> None:
    show(tab, server, "models/simple/1")
    tab.wait("[...document.querySelectorAll('button')].some(b => b.textContent === 'Copy as config.pbtxt')")
    assert tab.evaluate("[...document.querySelectorAll('.actions button')].map(b => b.textContent)") == [
        "Load",
        "Unload",
    ]


def test_the_overview(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server)
    # it shows what came in the last second: so requests come until it does
    until(lambda: infer(server, "simple") or tab.evaluate(f"parseFloat({cell('simple', 'Requests/s')}) > 0"))
    assert tab.evaluate(cell("simple", "State")) == "ready"
    assert tab.wait(f"{cell('simple', 'Runs on')} === '1 × CPU'")
    assert tab.wait(f"{cell('apart', 'Runs on')} === '2 × CPU, own processes'")
    assert tab.evaluate(cell("simple", "p99")) != "–"
    assert tab.evaluate(cell("broken", "State")) == "unavailable"
    assert BROKEN in tab.evaluate(cell("broken", "Reason")), "the reason is text"
    assert tab.evaluate(cell(HOSTILE, "State")) == "ready"
    assert tab.evaluate("document.querySelectorAll('main img, main script, main style').length") == 0
    text = tab.evaluate(TEXT)
    assert f"{server.process.pid}, up " in text and "Response cache" in text and "Loop lag" in text
    tab.evaluate("(f => { f.value = 'SIMP'; f.dispatchEvent(new Event('input')); })(document.querySelector('input[type=search]'))")  # fmt: skip
    assert tab.evaluate("document.querySelectorAll('.models tbody tr').length") == 1


@pytest.mark.slow
def test_the_front_ends(tab: Chromium, server: ServerProcess, repository: Path) -> None:
    shown = "[...document.querySelectorAll('[aria-label=\"Front ends\"]')].some(e => e.checkVisibility())"
    rows = "[...document.querySelectorAll('[aria-label=\"Front ends\"] tbody tr')]"
    texts = f"{rows}.map(r => [...r.cells].map(c => c.textContent))"
    if not FRONTENDS:
        show(tab, server)
        assert tab.evaluate(shown) is False
    flags = ("--frontends=2", "--model-control-mode=explicit", "--load-model=simple")
    with ServerProcess(repository, *flags) as other:
        show(tab, other)
        infer(other, "simple", 5)
        told = {
            str(int(value(scrape(other), "neptrio_front_end_process_id", front_end=str(i)))) for i in range(2)
        }
        tab.wait(f"{rows}.length === 2 && {texts}.every(row => row[3] !== '–' && row[7].endsWith('%'))")
        found = tab.evaluate(texts)
        assert [row[0] for row in found] == ["0", "1"] and {row[1] for row in found} == told
        assert [row[8] for row in found] == ["0", "0"]
        assert tab.evaluate(shown) is True


@pytest.mark.slow
def test_a_model(tab: Chromium, server: ServerProcess) -> None:
    infer(server, "simple", 5)
    show(tab, server)
    tab.wait(f"!!{cell('simple', 'State')}")
    click(tab, "simple", "document.querySelector('.models')")
    tab.wait(f"{TEXT}.includes('Why they were closed') && {TEXT}.includes('by the server')")
    marks = tab.evaluate("[...document.querySelectorAll('.from-defaulted .key')].map(e => e.textContent)")
    assert "instance_group" in marks and "max_batch_size" not in marks
    assert tab.evaluate("document.querySelector('.from-unset').checkVisibility()") is False
    click_box = "document.querySelector('.config').parentNode.querySelector('input').click()"
    tab.evaluate(click_box)
    assert tab.evaluate("document.querySelector('.from-unset').checkVisibility()") is True
    stages = tab.evaluate("[...document.querySelectorAll('[aria-label=\"Latency by stage\"] tbody th')].map(e => e.textContent)")  # fmt: skip
    assert stages == ["total", "queue", "input", "infer", "output"]
    show(tab, server, "models/apart/1")
    rows = (
        "[...document.querySelectorAll('[aria-label=Instances] tbody tr')].map(r => r.cells[1].textContent)"
    )
    tab.wait(f"{rows}.length === 2 && {rows}.every(pid => Number(pid) > 1)")
    show(tab, server, "models/broken/1")
    tab.wait(f"document.querySelector('.reason').textContent.includes({json.dumps(BROKEN)})")


@pytest.mark.slow
def test_a_request(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server, "request/simple/1")
    tab.wait("document.querySelectorAll('fieldset.input').length === 2")
    assert send(tab) == [str(i) for i in range(1, 17)]
    # what the server tells of this request, and its trace
    tab.wait(f"{TEXT}.includes('Told by the server') && {TEXT}.includes('Traced by the server')")
    assert tab.evaluate("document.querySelectorAll('.trace-box .stage-queue').length") > 0


def test_a_model_with_a_strange_name(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server, f"models/{quote(HOSTILE, safe='')}/1")
    tab.wait(f"{TEXT}.includes('by the server')")
    assert tab.evaluate("document.querySelector('h1').firstChild.textContent") == HOSTILE
    click(tab, "Send a request")
    tab.wait("document.querySelectorAll('fieldset.input').length === 2")
    assert send(tab) == [str(i) for i in range(1, 17)]


def png(path: Path, rgb: np.ndarray[Any, Any]) -> None:
    """Writes pixels (H, W, 3) as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    height, width = rgb.shape[:2]
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    rows = b"".join(b"\0" + row.tobytes() for row in rgb)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.slow
def test_files_images_and_wrong_values(tab: Chromium, server: ServerProcess, tmp_path: Path) -> None:
    rgb = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [10, 20, 30]]], np.uint8)
    png(tmp_path / "a.png", rgb)
    show(tab, server, "request/picture/1")
    tab.wait("!!document.querySelector('fieldset.input')")
    fill(tab, "fieldset select", "image")
    tab.choose_files("fieldset input[type=file]", tmp_path / "a.png")
    tab.wait(f"{TEXT}.includes('a.png: 2 × 2')")
    assert send(tab) == [str(value) for value in rgb.transpose(2, 0, 1).ravel()]
    click(tab, "Python")
    assert 'Image.open("a.png")' in tab.evaluate(TEXT)
    (tmp_path / "raw.bin").write_bytes(bytes(range(24)))
    fill(tab, "fieldset select", "file")
    tab.choose_files("fieldset input[type=file]", tmp_path / "raw.bin")
    tab.wait("document.querySelector('fieldset input[aria-label^=Shape]').value === '2, 3, 2, 2'")
    assert send(tab) == [str(i) for i in range(24)]
    fill(tab, "fieldset select", "values")
    fill(tab, "textarea", "1, 2, x")
    assert "UINT8 is a whole number, got 'x'" in tab.wait("document.querySelector('.problem').textContent")
    tab.wait("document.querySelector('[type=submit]').disabled")
    show(tab, server, "request/words/1")
    tab.wait("!!document.querySelector('fieldset.input')")
    fill(tab, "textarea", BROKEN)
    assert send(tab) == [BROKEN]
    fill(tab, "input[aria-label^=Shape]", "5, 1")
    tab.evaluate("document.querySelector('form.request').requestSubmit()")
    tab.wait(f"{TEXT}.includes('400: ')")


def test_traces(tab: Chromium, server: ServerProcess) -> None:
    with Http1(server.http) as client:
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        assert client.request("POST", "/v2/trace/setting", json.dumps(settings).encode()).status == 200
        infer(server, "simple", 2, BROKEN)
        infer(server, "simple", 1, "the other")
        client.request("POST", "/v2/trace/setting", b'{"trace_level": ["OFF"], "trace_rate": "1000"}')
    show(tab, server, "traces")
    ids = "[...document.querySelectorAll('.trace-box code')].map(e => e.textContent)"
    tab.wait(f"{ids}.includes('the other')")
    assert tab.evaluate(ids)[:3] == ["the other", BROKEN, BROKEN], "newest first"
    widths = tab.evaluate("[...document.querySelectorAll('.trace-box')[0].querySelectorAll('.waterfall i')].map(e => e.className)")  # fmt: skip
    assert "stage-queue" in widths
    tab.evaluate("document.querySelectorAll('.trace-box summary')[0].click()")
    assert "QUEUE_START" in tab.evaluate(TEXT)
    fill(tab, "input[type=search]", "the OTHER")
    assert tab.evaluate(ids) == ["the other"]
    fill(tab, "input[type=search]", "")
    fill(tab, "select[aria-label=Outcome]", "not ok")
    assert BROKEN not in tab.evaluate(ids)


@pytest.mark.slow
def test_settings_and_loading(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server, "settings")
    tab.wait("document.querySelectorAll('form.settings input').length > 5")
    fill(tab, "form.settings input[type=number]", "7")
    tab.evaluate("document.querySelector('form.settings').requestSubmit()")
    tab.wait("document.getElementById('notes').textContent.includes('Trace settings are applied')")
    with Http1(server.http) as client:
        assert json.loads(client.request("GET", "/v2/trace/setting").body)["trace_rate"] == "7"
    tab.evaluate(
        "document.querySelectorAll('form.settings')[1].querySelector('input[type=number]').value = 1"
    )
    tab.evaluate("document.querySelectorAll('form.settings')[1].requestSubmit()")
    tab.wait("document.getElementById('notes').textContent.includes('Log settings are applied')")
    with Http1(server.http) as client:
        assert json.loads(client.request("GET", "/v2/logging").body)["log_verbose_level"] == 1
    row = "[...document.querySelectorAll('[aria-label=Repository] tbody tr')].find(r => r.cells[0].textContent === 'words')"
    tab.wait(f"!!{row}")
    click(tab, "Unload", row)
    tab.wait("!!document.querySelector('dialog[open]')")
    click(tab, "Cancel", "document.querySelector('dialog')")
    tab.wait("!document.querySelector('dialog')")
    assert tab.evaluate(f"{row}?.cells[2].textContent") == "ready"
    click(tab, "Unload", row)
    click(tab, "Unload", "document.querySelector('dialog')")
    tab.wait(f"{row}?.cells[2].textContent === 'unavailable'")
    click(tab, "Load", row)
    tab.wait(f"{row}?.cells[2].textContent === 'ready'")
    broken = row.replace("'words'", "'broken'")
    click(tab, "Load", broken)
    tab.wait(f"document.getElementById('notes').textContent.includes({json.dumps(BROKEN)})")


@pytest.mark.slow
def test_sequences(tab: Chromium, server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for sequence in (2**64 - 3, 5):
            tensor = httpclient.InferInput("INPUT", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
            client.infer("sums", [tensor], sequence_id=sequence, sequence_start=True)
    show(tab, server, "models/sums/1")
    ids = "[...document.querySelectorAll('[aria-label=Sequences] tbody th')].map(e => e.textContent)"
    tab.wait(f"{ids}.length === 2")
    assert tab.evaluate(ids) == [str(2**64 - 3), "5"], "no digit is lost"
    row = "document.querySelector('[aria-label=Sequences] tbody tr')"
    click(tab, "End", row)
    click(tab, "End it", "document.querySelector('dialog')")
    tab.wait(f"{ids}.length === 1 && {ids}[0] === '5'")
    with Http1(server.http) as http:
        left = json.loads(http.request("GET", "/v2/models/sums/sequences").body)["sequences"]
        assert [sequence["id"] for sequence in left] == [5]


@pytest.mark.slow
def test_the_page_of_the_rest_port_fits_small_screens(tab: Chromium, server: ServerProcess) -> None:
    tab.look(380, 800)
    tab.visit(f"http://{server.http}/docs", "document.readyState === 'complete'")
    assert "simple" in tab.evaluate("document.body.innerText")
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    # long requests scroll in their own boxes, and nothing sticks out of the page beside them
    out = (
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1 "
        "&& !e.closest('pre, table, .scroll')).map(e => e.outerHTML.slice(0, 120))"
    )
    assert tab.evaluate(out) == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_small_screens(tab: Chromium, server: ServerProcess, dark: bool) -> None:
    tab.look(380, 800, dark)
    panels = (
        "",
        "models/sums/1",
        "models/broken/1",
        "models/fails/1",
        "models/chain/1",
        "request/simple/1",
        "traces",
        "log",
        "settings",
    )
    nameless = (
        "[...document.querySelectorAll('input, select, textarea, button')].filter(e => !(e.labels?.length "
        "|| e.getAttribute('aria-label') || e.textContent.trim() || e.placeholder)).map(e => e.outerHTML)"
    )
    for panel in ("", "request/simple/1") if dark else panels:
        show(tab, server, panel)
        assert tab.evaluate(nameless) == [], "controls without a name for those who listen"
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.evaluate(wide) == 0, panel
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(12, 16, 22)" if dark else "rgb(244, 245, 248)")
    tab.evaluate("localStorage.clear(); document.getElementById('theme').click()")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(244, 245, 248)"
    tab.evaluate("localStorage.clear()")


def test_keys(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server)
    tab.press("3")
    tab.wait("location.hash === '#traces' && document.querySelector('h1')?.textContent === 'Recent traces'")
    tab.press("/")
    assert tab.evaluate("document.activeElement.type") == "search"
    tab.press("2")
    assert tab.evaluate("document.activeElement.value") == "2", "typed, not a way to another panel"


@pytest.mark.slow
def test_tokens(started: Chromium, repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    file.write_text(FILE)
    flags = ("--model-control-mode=explicit", "--load-model=simple", f"--auth-config={file}")
    tab = started
    with ServerProcess(repository, *flags) as server:
        tab.visit(f"http://{server.metrics}/console/", "!!document.querySelector('dialog[open] input')")
        tab.evaluate("document.querySelector('dialog input').value = 'read'")
        click(tab, "Use it")
        tab.wait(f"{cell('simple', 'State')} === 'ready'")
        tab.visit(f"http://{server.metrics}/console/#settings", READY)
        tab.wait("document.querySelectorAll('form.settings input').length > 5")
        assert tab.evaluate("document.getElementById('state').textContent") == "ready", (
            "the tab still has the token"
        )
        tab.evaluate("document.querySelector('form.settings').requestSubmit()")
        tab.wait("document.getElementById('notes').textContent.includes('operate')")
        kept = tab.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
        assert "read" not in kept
        tab.evaluate("sessionStorage.clear()")


@pytest.mark.slow
def test_restricted_apis(started: Chromium, repository: Path) -> None:
    flags = (
        "--model-control-mode=explicit",
        "--load-model=simple",
        "--http-restricted-api=statistics:x-key=s3cret",
    )
    tab = started
    with ServerProcess(repository, *flags) as server:
        tab.visit(f"http://{server.metrics}/console/", "!!document.querySelector('dialog[open] input')")
        assert "x-key" in tab.evaluate("document.querySelector('dialog').textContent")
        assert tab.wait(f"{cell('simple', 'State')} === 'ready'"), "what is not restricted is shown"
        assert tab.evaluate(cell("simple", "Requests/s")) == "–"
        tab.evaluate("document.querySelector('dialog input').value = 's3cret'")
        click(tab, "Use it")
        tab.wait(f"{cell('simple', 'Requests/s')} !== '–'")
        assert "s3cret" not in tab.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
        tab.evaluate("sessionStorage.clear()")


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(started: Chromium, repository: Path) -> None:
    tab = started
    with held_port() as port:
        flags = ("--model-control-mode=explicit", "--load-model=simple", f"--metrics-port={port}")
        with ServerProcess(repository, *flags) as server:
            show(tab, server)
        tab.wait("document.getElementById('state').textContent === 'the server cannot be reached'")
        with ServerProcess(repository, *flags):
            tab.wait("document.getElementById('state').textContent === 'ready'")
            tab.wait(f"{cell('simple', 'State')} === 'ready'")
