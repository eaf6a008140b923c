"""What the console's form says besides the answer, in a real browser: the same request as programs, which are run, and
sequences."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from neptrio.codec.http_json import load_json
from tests.browser.panels import HOSTILE, TEXT, click, fill, send, show
from tests.support.browser import Chromium
from tests.support.http import Http1
from tests.support.server import ServerProcess

EXAMPLE = "document.querySelector('.tabs + div pre').textContent"
PYTHONS = ["Python", "Python asyncio", "Python gRPC"]
LANGUAGES = ["curl", *PYTHONS, "JavaScript"]
USED_LATER = """
try:
    client.is_server_live()
except ValueError as error:
    print(error)
"""


def example(tab: Chromium, language: str) -> str:
    click(tab, language, "document.querySelector('.tabs')")
    text = tab.evaluate(EXAMPLE)
    assert isinstance(text, str)
    return text


def run(language: str, text: str, folder: Path) -> str:
    """What an example prints."""
    if language == "curl":
        command = ["sh", "-c", text]
    elif language == "JavaScript":
        node = shutil.which("node")
        if node is None:
            pytest.skip("no node on PATH")
        command = [node, "--input-type=module", "-e", text]
    else:
        command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["simple", HOSTILE], ids=["simple", "strange"])
def test_the_same_request_elsewhere(tab: Chromium, server: ServerProcess, tmp_path: Path, model: str) -> None:
    show(tab, server, "request/" + "".join(f"%{byte:02X}" for byte in model.encode()) + "/1")
    tab.wait("document.querySelectorAll('fieldset.input').length === 2")
    fill(tab, "form input[placeholder=none]", "an id '\"`")
    fill(tab, "form input[placeholder^='{']", json.dumps({"priority": 0, "own": "a\n'\"`${x}"}))
    tab.wait(f"{EXAMPLE}.includes('own')")
    tabs = "[...document.querySelector('.tabs').children].map(e => e.textContent)"
    assert tab.evaluate(tabs) == LANGUAGES
    for language in LANGUAGES if model == "simple" else ["Python gRPC"]:
        said = run(language, example(tab, language), tmp_path)
        if language == "curl":
            answer = load_json(said.encode())
            assert answer["outputs"][0]["data"] == list(range(1, 17)) and answer["id"] == "an id '\"`"
        elif language == "JavaScript":
            assert "OUTPUT0 [" in said and "16" in said
        else:
            assert "OUTPUT0 [[ 1  2  3  4" in said
    pressed = "[...document.querySelector('.tabs').children].find(e => e.getAttribute('aria-pressed') === 'true').textContent"
    assert tab.evaluate(pressed) == (LANGUAGES[-1] if model == "simple" else "Python gRPC")


@pytest.mark.slow
def test_examples_of_a_model_that_answers_often_read_all_answers(
    tab: Chromium, server: ServerProcess, tmp_path: Path
) -> None:
    show(tab, server, "request/counts/1")
    tab.wait("document.querySelectorAll('fieldset.input').length === 1")
    assert tab.evaluate("[...document.querySelector('.tabs').children].map(e => e.textContent)") == [
        "curl",
        "Python gRPC",
        "JavaScript",
    ]
    said = run("Python gRPC", example(tab, "Python gRPC") + USED_LATER, tmp_path).split("\n")
    assert said[:2] == ["OUT [0 0 0 0]", "OUT [1 1 1 1]"]
    assert "closed channel" in said[2], (
        "else the end of the interpreter may wait for threads that it has stopped"
    )
    for language in ("curl", "JavaScript"):
        said = run(language, example(tab, language), tmp_path)
        assert '"data":[0,0,0,0]' in said and '"data":[1,1,1,1]' in said


@pytest.mark.slow
def test_a_body_with_many_values_is_saved_for_javascript(
    tab: Chromium, server: ServerProcess, tmp_path: Path
) -> None:
    show(tab, server, "request/picture/1")
    tab.wait("!!document.querySelector('fieldset.input')")
    (tmp_path / "raw.bin").write_bytes(bytes(range(12)))
    fill(tab, "fieldset select", "file")
    tab.choose_files("fieldset input[type=file]", tmp_path / "raw.bin")
    tab.wait(f"{EXAMPLE}.includes('request.bin') && {TEXT}.includes('Save the body')")
    text = example(tab, "JavaScript")
    head = int(text.partition('"Inference-Header-Content-Length": "')[2].partition('"')[0])
    meta = {"inputs": [{"name": "INPUT0", "shape": [1, 3, 2, 2], "datatype": "UINT8", "parameters": {"binary_data_size": 12}}]}  # fmt: skip
    document = json.dumps(meta, separators=(",", ":")).encode()
    assert len(document) == head, "the length that the example names is that of the body that the page saves"
    (tmp_path / "request.bin").write_bytes(document + np.arange(12, dtype=np.uint8).tobytes())
    assert "OUTPUT0" in run("JavaScript", text, tmp_path)


def test_a_sequence_goes_on_from_request_to_request(tab: Chromium, server: ServerProcess) -> None:
    show(tab, server, "request/sums/1")
    tab.wait("document.querySelectorAll('fieldset.input').length === 2")
    many = 2**64 - 5
    fill(tab, "input[aria-label='Sequence id']", str(many))
    fill(tab, "textarea", "3")
    boxes = "[...document.querySelectorAll('fieldset .check input')].map(e => e.checked)"
    assert tab.evaluate(boxes) == [True, False]
    assert f'"sequence_id":{many}' in tab.evaluate(EXAMPLE), "no digit is lost"
    first = send(tab)
    assert tab.evaluate(boxes) == [False, False]
    second = send(tab)
    assert [int(text) for text in (first[0], second[0])] == [3, 6], "the model sums up what a sequence sends"
    tab.wait(f"{TEXT}.includes('2 requests of sequence {many} answered')")
    with Http1(server.http) as client:
        left = load_json(client.request("GET", "/v2/models/sums/sequences").body)["sequences"]
        assert many in [sequence["id"] for sequence in left]
    tab.evaluate("document.querySelectorAll('fieldset .check input')[1].click()")
    assert int(send(tab)[0]) == 9
    tab.wait(f"{TEXT}.includes('The sequence has ended after 3 requests')")
    assert tab.evaluate(boxes) == [True, False]
    with Http1(server.http) as client:
        left = load_json(client.request("GET", "/v2/models/sums/sequences").body)["sequences"]
        assert many not in [sequence["id"] for sequence in left]
    fill(tab, "input[aria-label='Sequence id']", "0")
    tab.wait("document.querySelector('.problem').textContent.includes('from 1 to 18446744073709551615')")
