"""What tests of the console do with its panels in a browser."""

from __future__ import annotations

import json

from tests.support.browser import Chromium
from tests.support.http import Http1
from tests.support.server import ServerProcess

# a model's folder may have any name without a slash, and a model's error any text
HOSTILE = "<img src=x onerror=alert(1)>&'\"`${1}"
BROKEN = "</script><script>alert(1)</script><style>*{display:none}</style>"
ROUNDS = "Number(document.documentElement.dataset.rounds || 0)"
READY = f"{ROUNDS} >= 2"
TEXT = "document.getElementById('main').innerText"


def show(tab: Chromium, server: ServerProcess, panel: str = "") -> None:
    tab.visit(f"http://{server.metrics}/console/#{panel}", READY)
    # a second's pace: the tests wait for what the next round brings
    tab.evaluate(
        "(p => { p.value = '1'; p.dispatchEvent(new Event('change')); })(document.getElementById('pace'))"
    )


def infer(server: ServerProcess, model: str, times: int = 1, request_id: str = "") -> None:
    body = {
        "inputs": [
            {"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for i in (0, 1)
        ]
    }
    if request_id:
        body |= {"id": request_id}
    with Http1(server.http) as client:
        for _ in range(times):
            assert (
                client.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode()).status == 200
            )


def cell(model: str, column: str) -> str:
    """The text of a cell of the table of models. The reason stands in a row of its own below the model's."""
    if column == "Reason":
        found = "(e => e?.classList.contains('under') ? e.textContent : '')(r.nextElementSibling)"
    else:
        found = f"[...r.cells].find(c => c.dataset.name === '{column}').textContent"
    rows = "[...document.querySelectorAll('.models tbody tr')]"
    return f"{rows}.filter(r => r.cells[0].textContent === {json.dumps(model)}).map(r => {found})[0]"


def click(tab: Chromium, text: str, within: str = "document") -> None:
    tab.wait(
        f"(b => b && !b.disabled && (b.click(), true))([...(({within})?.querySelectorAll('button, a') ?? [])]"
        f".find(b => b.textContent.trim() === {json.dumps(text)}))"
    )


def send(tab: Chromium) -> list[str]:
    """Sends the form; the texts of the answer's values."""
    tab.evaluate("document.querySelectorAll('.tensor').forEach(e => e.remove())")
    tab.wait("!document.querySelector('form.request [type=submit]').disabled")
    tab.evaluate("document.querySelector('form.request').requestSubmit()")
    tab.wait("!!document.querySelector('.tensor')")
    found: list[str] = tab.evaluate("[...document.querySelector('.tensor').querySelectorAll('li')].map(e => e.textContent)")  # fmt: skip
    return found


def fill(tab: Chromium, selector: str, text: str) -> None:
    tab.evaluate(f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('input', {{bubbles: true}})); e.dispatchEvent(new Event('change', {{bubbles: true}})); }})(document.querySelector({json.dumps(selector)}))")  # fmt: skip
