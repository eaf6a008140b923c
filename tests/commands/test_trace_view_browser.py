"""The page of `neptrio trace view` in a real browser: what is drawn, filters, keys, hostile names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from neptrio import commands
from tests.support import browser
from tests.support.browser import Browser
from tests.support.traced import HOSTILE

BROWSERS = browser.installed()
WANTED = os.environ.get("NEPTRIO_BROWSER")  # a name: that one and no other
pytestmark = pytest.mark.skipif(
    not BROWSERS, reason="no chromium, google-chrome or firefox on PATH: the page is not drawn"
)
MS = 1_000_000
ROWS = "[...document.querySelectorAll('.row')]"
TEXTS = f"{ROWS}.map(row => row.querySelector('.model').textContent + ' ' + row.querySelector('.rid').textContent)"
FIGURES = "document.getElementById('figures').textContent"
CHOSEN = "(document.querySelector('.row[aria-selected=true] .rid') || {}).textContent"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    started = browser.start(WANTED or BROWSERS[0])
    try:
        yield started
    finally:
        started.close()


def view(tmp_path: Path, content: Any) -> Path:
    source, out = tmp_path / "trace.json", tmp_path / "page.html"
    source.write_text(json.dumps(content))
    assert commands.run("trace", ["view", str(source), "-o", str(out)]) == 0
    return out


def request(number: int, model: str, start_us: int, us: int, rid: str, **more: Any) -> dict[str, Any]:
    """A request: a tenth received, two queued, half executed, a tenth sent, the rest between."""
    points = (("HTTP_RECV_START", 0), ("HTTP_RECV_END", 10), ("REQUEST_START", 12), ("QUEUE_START", 14),
              ("COMPUTE_START", 34), ("COMPUTE_INPUT_END", 36), ("COMPUTE_OUTPUT_START", 86),
              ("COMPUTE_END", 88), ("REQUEST_END", 89), ("HTTP_SEND_START", 90), ("HTTP_SEND_END", 100))  # fmt: skip
    times = [{"name": name, "ns": start_us * 1000 + us * share * 10} for name, share in points]
    return {
        "id": number,
        "model_name": model,
        "model_version": 1,
        "request_id": rid,
        "timestamps": times,
        **more,
    }


def step(number: int, model: str, parent: int, start_us: int, us: int) -> dict[str, Any]:
    made = request(number, model, start_us, us, "", parent_id=parent)
    made["timestamps"] = [t for t in made["timestamps"] if "HTTP" not in t["name"]]
    return made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """alpha 1 ms; an ensemble of 3 ms with two steps; beta 2 ms, failed."""
    ensemble = request(2, "ensemble", 2000, 3000, "two")
    ensemble["timestamps"] = [t for t in ensemble["timestamps"] if "COMPUTE" not in t["name"]]
    return view(tmp_path_factory.mktemp("three"), [
        request(1, "alpha", 1000, 1000, "one"),
        ensemble, step(3, "alpha", 2, 2500, 1000), step(4, "beta", 2, 3500, 1000),
        request(5, "beta", 9000, 2000, "three", error="no luck"),
    ])  # fmt: skip


def test_what_is_drawn(tab: Browser, three: Path) -> None:
    tab.open(three)
    assert tab.evaluate(TEXTS) == ["alpha one", "ensemble two", "alpha #3", "beta #4", "beta three"]
    assert "3 of 3 requests · 1 not ok" in tab.evaluate(FIGURES)
    legend = tab.evaluate("[...document.querySelectorAll('#legend button')].map(b => b.textContent)")
    assert legend == ["receive", "overhead", "queue", "input", "infer", "output", "send", "steps"]
    drawn = tab.evaluate(
        f"{ROWS}.map(row => [...row.querySelectorAll('.seg')].map(seg => [seg.className.match(/stage-(\\w+)/)[1], "
        "parseFloat(seg.style.left), parseFloat(seg.style.width)]))"
    )
    assert [stage for stage, _, _ in drawn[0]] == [
        "receive", "overhead", "overhead", "queue", "input", "infer", "output", "overhead", "overhead", "send"
    ]  # fmt: skip
    widths = {stage: width for stage, _, width in drawn[0]}
    assert widths["infer"] == pytest.approx(5 * widths["receive"], rel=1e-3)
    assert widths["infer"] == pytest.approx(2.5 * widths["queue"], rel=1e-3)
    assert drawn[4][5][2] == pytest.approx(2 * drawn[0][5][2], rel=1e-3)  # one scale for all rows
    steps = {stage: (left, left + width) for stage, left, width in drawn[1]}["steps"]
    assert steps[0] < drawn[2][0][1] < drawn[3][0][1] < steps[1]  # children lie within their parent
    colours = tab.evaluate(
        "[...document.querySelectorAll('.row:first-child .seg')].map(seg => getComputedStyle(seg).backgroundColor)"
    )
    shown = {stage: colour for (stage, _, _), colour in zip(drawn[0], colours, strict=True)}
    assert len(set(shown.values())) == len(shown) == 7  # every stage has a colour of its own
    assert tab.evaluate(f"{ROWS}.map(row => row.getAttribute('aria-level'))") == ["1", "1", "2", "2", "1"]
    failed = (
        f"{ROWS}[4].querySelector('.chip.failed').textContent + {ROWS}[4].querySelector('.cross').textContent"
    )
    assert tab.evaluate(failed) == "failed✕"
    assert not tab.network and not tab.messages


@pytest.mark.parametrize(
    ("fragment", "rows"),
    [
        ({"model": "alpha"}, ["alpha one", "ensemble two", "alpha #3", "beta #4"]),
        ({"min": "1999"}, ["ensemble two", "alpha #3", "beta #4", "beta three"]),
        ({"min": "2000.5", "folded": "1"}, ["ensemble two"]),
        ({"q": "three"}, ["beta three"]),
        ({"q": "LUCK beta"}, ["beta three"]),
        ({"q": "#4", "folded": "1"}, ["ensemble two"]),
        ({"q": "none of them"}, []),
        ({"outcome": "failed"}, ["beta three"]),
        ({"outcome": "not ok"}, ["beta three"]),
        ({"front": "gRPC"}, []),
        ({"sort": "slow", "folded": "1"}, ["ensemble two", "beta three", "alpha one"]),
        ({"sort": "model", "folded": "1"}, ["alpha one", "beta three", "ensemble two"]),
        ({"sort": "nonsense", "folded": "1"}, ["alpha one", "ensemble two", "beta three"]),
        ({"from": "500", "to": "2000", "folded": "1"}, ["ensemble two"]),
    ],
)
def test_filters_in_the_address(tab: Browser, three: Path, fragment: dict[str, str], rows: list[str]) -> None:
    tab.open(three, urlencode(fragment))
    assert tab.evaluate(TEXTS) == rows
    assert tab.evaluate("document.getElementById('nothing').hidden") is bool(rows)
    if "nonsense" not in fragment.values():
        assert tab.evaluate("location.hash.slice(1)") == urlencode(fragment)
    assert not tab.messages


def test_filters_by_hand(tab: Browser, three: Path) -> None:
    tab.open(three)
    fill = "(() => {{ const e = document.getElementById('{0}'); e.value = '{1}'; e.dispatchEvent(new Event('input')); return 1; }})()"
    tab.evaluate(fill.format("model", "beta"))
    tab.evaluate(fill.format("min", "2500"))
    assert tab.evaluate(TEXTS) == ["ensemble two", "alpha #3", "beta #4"]
    assert tab.evaluate("location.hash") == "#model=beta&min=2500"
    tab.press("/")
    tab.press(*"three")
    assert tab.evaluate(TEXTS) == [] and "0 of 3" in tab.evaluate(FIGURES)
    tab.evaluate("document.getElementById('nothing-clear').click()")
    assert len(tab.evaluate(TEXTS)) == 5 and tab.evaluate("location.hash.slice(1)") == ""


@pytest.mark.slow
def test_keys(tab: Browser, three: Path) -> None:
    tab.open(three)
    tab.evaluate("document.getElementById('table').focus()")
    tab.press("ArrowDown", "j")
    assert tab.evaluate(CHOSEN) == "two"
    tab.press("ArrowLeft")
    assert tab.evaluate(TEXTS) == ["alpha one", "ensemble two", "beta three"]
    assert tab.evaluate(f"{ROWS}[1].getAttribute('aria-expanded')") == "false"
    tab.press("ArrowRight", "ArrowRight", "ArrowDown")
    assert tab.evaluate(CHOSEN) == "#4"
    active = "document.getElementById(document.getElementById('table').getAttribute('aria-activedescendant'))"
    assert tab.evaluate(f"{active}.querySelector('.rid').textContent") == "#4"
    tab.press("Enter")
    assert "beta (1)" in tab.evaluate("document.getElementById('details').textContent")
    tab.press("ArrowLeft", "End")
    assert tab.evaluate("document.querySelector('#details .error').textContent") == "no luck"
    tab.press("Escape")
    assert tab.evaluate("document.getElementById('details').hidden") is True
    tab.press("Home")
    assert tab.evaluate(CHOSEN) == "one"
    before = tab.evaluate("parseFloat(document.querySelector('#row-4 .seg.stage-infer').style.width)")
    tab.press("+")
    wide = tab.evaluate("parseFloat(document.querySelector('#row-4 .seg.stage-infer').style.width)")
    assert wide > before
    tab.press("0")
    assert tab.evaluate(
        "parseFloat(document.querySelector('#row-4 .seg.stage-infer').style.width)"
    ) == pytest.approx(before)
    tab.press("e")
    assert tab.evaluate(TEXTS) == ["alpha one", "ensemble two", "beta three"]
    tab.press("?")
    assert tab.evaluate("document.getElementById('help').open") is True
    tab.press("Escape")
    assert not tab.messages


def test_details_of_a_click(tab: Browser, three: Path) -> None:
    tab.open(three)
    tab.evaluate(f"{ROWS}[0].click()")
    points = tab.evaluate(
        "[...document.querySelectorAll('#details .points tr')].map(row => [...row.cells].map(c => c.textContent))"
    )
    assert points[:4] == [
        ["Point", "at µs", "Δ µs"], ["HTTP_RECV_START", "0.000", ""], ["HTTP_RECV_END", "100.000", "100.000"],
        ["REQUEST_START", "120.000", "20.000"],
    ]  # fmt: skip
    stages = tab.evaluate(
        "[...document.querySelectorAll('#details .stages tr')].map(row => [...row.cells].map(c => c.textContent))"
    )
    assert ["infer", "500.000", "50"] in stages and ["overhead", "60.000", "6"] in stages
    tab.evaluate(f"{ROWS}[1].click()")
    tab.evaluate("[...document.querySelectorAll('#details .link')][1].click()")
    assert "beta (1)" in tab.evaluate("document.getElementById('details').textContent")
    tab.evaluate("document.querySelector('#details .link').click()")
    assert "ensemble (1)" in tab.evaluate("document.getElementById('details').textContent")
    assert tab.evaluate("location.hash") == "#trace=2"


def test_a_link_opens_a_trace_that_filters_hide(tab: Browser, three: Path) -> None:
    tab.open(three, "model=alpha&folded=1&trace=4")
    assert tab.evaluate(CHOSEN) == "#4" and not tab.evaluate("document.getElementById('details').hidden")
    tab.open(three, "q=one&trace=5")
    assert tab.evaluate(CHOSEN) == "three" and "3 of 3" in tab.evaluate(FIGURES)


def test_scales(tab: Browser, three: Path) -> None:
    lefts = f"{ROWS}.map(row => Math.round(parseFloat(row.querySelector('.seg').style.left)))"
    tab.open(three, "folded=1")
    assert tab.evaluate(lefts) == [0, 0, 0]
    tab.open(three, "folded=1&scale=timeline")
    first, second, third = tab.evaluate(lefts)
    assert first == 0 and third == pytest.approx(8 * second, abs=4) and second > 5
    tab.open(three, "folded=1&scale=share")
    widths = tab.evaluate(f"{ROWS}.map(row => parseFloat(row.querySelector('.stage-receive').style.width))")
    assert widths == [pytest.approx(widths[0])] * 3 and widths[0] == pytest.approx(10, rel=0.05)


def test_every_kind_of_request_of_a_real_server(tab: Browser, every_kind: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert commands.run("trace", ["view", str(every_kind), "-o", str(out)]) == 0
    tab.open(out)
    rows = {
        name: (level, chips)
        for name, level, chips in tab.evaluate(
            f"{ROWS}.map(row => [row.querySelector('.model').textContent + ' ' + row.querySelector('.rid').textContent, "
            "row.getAttribute('aria-level'), [...row.querySelectorAll('.chip')].map(chip => chip.textContent)])"
        )
    }
    assert rows["single http"] == ("1", ["HTTP"]) and rows["single grpc"] == ("1", ["gRPC"])
    assert rows["failing fails"] == ("1", ["failed", "HTTP"])
    assert rows["gate cancelled"] == ("1", ["cancelled", "gRPC"])
    assert rows["cached cache hit"] == ("1", ["cache", "HTTP"]) and rows["cached cache miss"] == (
        "1",
        ["HTTP"],
    )
    assert rows["repeat decoupled"] == ("1", ["◆ 3", "gRPC"])
    levels = tab.evaluate(f"{ROWS}.map(row => row.getAttribute('aria-level')).join('')")
    assert levels.startswith("1122" + "12332" + "12")  # http, pipeline; nested pipeline; BLS
    assert tab.evaluate("document.querySelectorAll('.reply').length") == 3
    tab.open(out, "q=http")
    tab.evaluate(f"{ROWS}[0].click()")
    boxes = tab.evaluate(
        "[...document.querySelectorAll('#details .tensor')].map(box => box.innerText.replace(/\\s+/g, ' '))"
    )
    numbers = ",".join(map(str, range(16)))
    assert boxes[0].strip() == f"INPUT0 INT32 [1,16] QUEUE_INPUT {numbers}" and len(boxes) == 3
    assert any(
        row == HOSTILE
        for row in tab.evaluate(
            "JSON.parse(document.getElementById('traces').textContent).traces.map(row => row[4])"
        )
    )
    assert not tab.network and not tab.messages


@pytest.mark.slow
def test_hostile_names_do_nothing(tab: Browser, tmp_path: Path) -> None:
    texts = [
        HOSTILE, "<img src=http://127.0.0.1:9/x onerror=alert(1)>", "</style><style>*{background:url(//127.0.0.1:9)}",
        "<!--<script>", "{{7*7}}", "__proto__", "constructor", "\u202e reversed", "javascript:alert(1)", "\x00",
        "<svg onload=alert(1)>", "&lt;b&gt;", "a" * 100_000,
    ]  # fmt: skip
    items = []
    for number, text in enumerate(texts, 1):
        item = request(number, text, number * 1000, 500, text, error=text)
        item["timestamps"].append({"name": text, "ns": number * MS + 1})
        items.append(item)
        tensor = {"name": text, "data": text, "dtype": text, "shape": text, "omitted": text}
        items.append({"id": number, "activity": text, "tensor": tensor})
    page = view(tmp_path, items)
    tab.open(page, "trace=1")
    for number in range(1, len(texts) + 1):
        tab.evaluate(f"location.hash = 'trace={number}'")
        tab.wait(f"document.querySelector('#details .facts').textContent.includes('trace {number}')")
        assert tab.evaluate("document.querySelectorAll('.row').length") == len(texts)
        shown = tab.evaluate("document.querySelector('#details .error').textContent")
        assert shown == (texts[number - 1] if number < len(texts) else "a" * 4000 + "…")
        assert not tab.network and not tab.messages
    assert tab.evaluate("document.querySelectorAll('script, img, svg, style, iframe, link').length") == 3
    tab.evaluate("document.querySelector('#model').value = '__proto__'")
    tab.open(page, "model=__proto__")
    assert tab.evaluate("document.querySelectorAll('.row').length") == 1


def test_the_policy_holds_in_the_browser(tab: Browser, three: Path) -> None:
    tab.open(three)
    tab.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.injected = 1'; document.body.append(s);"
        " const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x'; document.body.append(i); return 1; })()"
    )
    assert tab.evaluate("window.injected === undefined") is True


@pytest.mark.slow
def test_ten_thousand_requests(tab: Browser, tmp_path: Path) -> None:
    items = []
    for i in range(10_000):
        items.append(request(3 * i + 1, f"model-{i % 7}", i * 100, 100 + i % 997, f"r{i}"))
        items.append(step(3 * i + 2, "inner", 3 * i + 1, i * 100 + 20, 40))
    tab.open(view(tmp_path, items))
    assert "10,000 of 10,000 requests" in tab.evaluate(FIGURES)
    assert tab.evaluate("document.querySelectorAll('.row').length") < 100  # only what can be seen exists
    assert tab.evaluate("document.getElementById('table').getAttribute('aria-rowcount')") == "20001"
    tab.evaluate("document.getElementById('table').focus()")
    tab.press("End", "PageDown")
    assert tab.evaluate(CHOSEN) == "#29999" and tab.evaluate(f"{ROWS}.length") < 100
    tab.evaluate("document.getElementById('scroll').scrollTop = 26 * 10000")
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    assert tab.evaluate(frames) == 1
    tab.wait(f"{ROWS}.some(row => row.querySelector('.rid').textContent === 'r5000')")
    tab.open(tmp_path / "page.html", "q=r777&model=model-0&sort=slow&folded=1")
    expected = sorted((i for i in range(10_000) if f"r{i}".startswith("r777") and i % 7 == 0), key=lambda i: -(i % 997))  # fmt: skip
    assert tab.evaluate(TEXTS) == [f"model-0 r{i}" for i in expected] and expected
    assert not tab.messages
