"""/openapi.json is the whole route table, and the page at /docs shows it without anything from elsewhere."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from neptrio.transport.rest import openapi, routes
from neptrio.transport.rest.openapi.document import templates
from neptrio.transport.rest.openapi.operations import OPERATIONS
from neptrio.transport.rest.openapi.page import STYLE
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    made = {(verb, method) for verb, _, methods in routes.TABLE for method in methods}
    assert made == set(OPERATIONS)


def test_a_route_without_an_operation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    new = ("new", re.compile(r"/v2/new\Z"), ("GET",))
    monkeypatch.setattr(routes, "TABLE", (*routes.TABLE, new))
    with pytest.raises(KeyError, match="new"):
        openapi.document.__wrapped__()


def test_the_paths_are_those_of_the_routes() -> None:
    document = openapi.document()
    names = {"model": "m", "version": "1", "region": "r", "repository": "x", "sequence": "7"}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            route = routes.match(method.upper(), path.format(**names))
            assert route is not None and route.allowed
            assert operation["operationId"].startswith(f"{route.verb}_{method}")
            given = {name for name in names if f"{{{name}}}" in path}
            assert {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"} == given
    assert len({o["operationId"] for item in document["paths"].values() for o in item.values()}) == sum(
        len(item) for item in document["paths"].values()
    )


def test_optional_parts_of_a_path() -> None:
    pattern = r"/v2/a(?:/versions/(?P<version>[0-9]+))?/b\Z"
    assert list(templates(pattern)) == [
        ("/v2/a/b", {}),
        ("/v2/a/versions/{version}/b", {"version": "[0-9]+"}),
    ]


def test_every_reference_has_a_schema() -> None:
    document = openapi.document()
    schemas = document["components"]["schemas"]
    assert set(REFERENCE.findall(json.dumps(document))) == set(schemas)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = dict(attrs)
        self.tags.append(tag)
        self.attributes |= set(given)
        self.ids |= {given["id"]} if "id" in given else set()
        self.links += [given["href"]] if "href" in given else []


def test_the_page_begins_with_the_models_and_a_request_to_each(tmp_path: Path) -> None:
    write_model(
        tmp_path, "it's <b>", identity_config(pairs=1)
    )  # a name that neither a page nor a shell may take amiss
    write_model(tmp_path, "plain", identity_config(pairs=1), versions=(1, 2))
    write_model(tmp_path, "image", identity_config("TYPE_FP32", "3, 22, 22", pairs=1))
    write_model(tmp_path, "half", identity_config("TYPE_FP16", "-1, 3", pairs=1))
    write_model(tmp_path, "words", identity_config("TYPE_STRING", "100", 0, pairs=1))
    corrid = "control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }"
    named = f'sequence_batching {{ control_input {{ name: "ID" {corrid} }} }}'
    write_model(tmp_path, "steps", identity_config(pairs=1, extra="sequence_batching { }"))
    write_model(tmp_path, "steps_by_name", identity_config(pairs=1, extra=named))
    write_model(
        tmp_path, "many", identity_config(pairs=1, extra="model_transaction_policy { decoupled: true }")
    )
    with ServerProcess(tmp_path) as server, Http1(server.http) as client:
        pages = [client.request("GET", path) for path in ("/docs", "/")]
        nowhere = client.request("GET", "/nowhere")
        assert [page.status for page in pages] == [200, 200] and pages[0].body == pages[1].body
        text = pages[0].body.decode()
        assert "<b>" not in text and text.count("<code>plain</code>") == 1
        commands = [html.unescape(found) for found in re.findall(r"<pre>(curl .*?)</pre>", text)]
        assert len(commands) == 5
        assert all(
            " http://localhost/" in c or " 'http://localhost/" in c for c in commands
        )  # as the client said
        (plain,) = [command for command in commands if "/plain/" in command]
        plain = plain.replace("localhost", server.http)
        done = subprocess.run(plain, shell=True, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["model_name"] == "plain"
        assert shlex.split(next(c for c in commands if "it" in c))[2].endswith("/v2/models/it's <b>/infer")
        for name in ("steps", "steps_by_name", "many"):  # a sequence of one request, and a stream of answers
            (command,) = [command for command in commands if f"/{name}/" in command]
            command = command.replace("localhost", server.http)
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
            answer = json.loads(done.stdout.removeprefix("data: "))
            assert (answer.get("model_name"), answer.get("error")) == (name, None)
        zeros = [html.unescape(found) for found in re.findall(r"<pre>(\{ .*?)</pre>", text)]
        assert len(zeros) == 3
        for command in zeros:  # inputs that do not fit on a line, and of a type that JSON lacks
            command = command.replace("localhost", server.http)
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
            )
            if "/half/" in command:
                head, _, data = (tmp_path / "answer.bin").read_bytes().partition(b"}}]}")
                assert b'"half"' in head and data == bytes(6)
            else:
                (output,) = json.loads(done.stdout)["outputs"]
                assert output["data"] in ([0.0] * 3 * 22 * 22, [""] * 100)
    assert nowhere.status == 404 and b"/docs" in nowhere.body


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Http1(server.http) as client:
        document = client.request("GET", "/openapi.json")
        reply = client.request("GET", "/docs")
    assert document.status == reply.status == 200
    assert json.loads(document.body) == openapi.document()
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    text = reply.body.decode()
    page = _Page()
    page.feed(text)
    assert not {"script", "link", "img", "iframe", "form"} & set(page.tags)
    assert not {"style", "src"} & {name for name in page.attributes if not name.startswith("on")}
    assert not any(name.startswith("on") for name in page.attributes)
    assert all(link == "/openapi.json" or link[1:] in page.ids for link in page.links)
    assert "url(" not in STYLE and "@import" not in STYLE
    for path in openapi.document()["paths"]:
        assert f"<code>{path}</code>" in text
