"""Renders the OpenAPI document as one HTML page, with the models that serve: without scripts, without anything from
elsewhere.

The page's only style sheet is in it and is named to the browser by its hash, so that the page can forbid everything
else (HEADERS).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from typing import Any

from neptrio.config import describe_config, sample_request
from neptrio.transport.rest.openapi.document import document

MOST_MODELS = 200  # on the page

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--get:#2563eb;--post:#15803d}
body{overflow-wrap:anywhere;font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1rem}
code,pre{font:.875rem/1.45 ui-monospace,monospace}
pre{background:var(--soft);overflow-x:auto;padding:.6rem;border-radius:.4rem}
details{border:1px solid var(--line);border-radius:.4rem;margin:.4rem 0;padding:.3rem .7rem}
summary{cursor:pointer;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid var(--line);padding:.2rem .5rem;text-align:left;vertical-align:top}
.m{border-radius:.3rem;color:#fff;font-weight:600;padding:.05rem .4rem}
.get{background:var(--get)}.post{background:var(--post)}
nav a{display:inline-block;margin-right:.8rem}
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", CONTENT_SECURITY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def page(configs: Iterable[Any] = (), rest: str = "http://localhost:8000") -> bytes:
    """The page, UTF-8: the models of these configurations, with requests to the server at the URL `rest`, and the verbs."""
    head, tail = _verbs()
    return f"{head}{_models(list(configs), rest)}{tail}".encode()


def _models(configs: list[Any], rest: str) -> str:
    parts = []
    for config in configs[:MOST_MODELS]:
        batch = config.max_batch_size > 0
        rows = "".join(
            f"<tr><td>{kind}</td><td><code>{escape(t['name'])}</code></td><td>{escape(t['datatype'])}</td>"
            f"<td>{escape(str(t['shape']))}</td></tr>"
            for kind, tensors in (("in", config.input), ("out", config.output))
            for t in describe_config.metadata_tensors(tensors, batch)
        )
        command = sample_request.command(config, rest)
        example = f"<pre>{escape(command)}</pre>" if command else ""
        parts.append(
            f"<details><summary><code>{escape(config.name)}</code></summary>"
            f"<table><tr><th></th><th>tensor</th><th>datatype</th><th>shape</th></tr>{rows}</table>{example}</details>"
        )
    more = "<p>and more: <code>POST /v2/repository/index</code></p>" if len(configs) > MOST_MODELS else ""
    return f'<h2 id="models">models</h2>{"".join(parts) or "<p>none serves</p>"}{more}'


@cache
def _verbs() -> tuple[str, str]:
    """What comes before and after the models."""
    whole = document()
    by_tag: dict[str, list[str]] = {tag["name"]: [] for tag in whole["tags"]}
    for path, item in whole["paths"].items():
        for method, operation in item.items():
            by_tag[operation["tags"][0]].append(_operation(path, method, operation))
    links = "".join(f'<a href="#{_id(tag)}">{escape(tag)}</a>' for tag in ["models", *by_tag, "schemas"])
    parts = [f'<h2 id="{_id(tag)}">{escape(tag)}</h2>{"".join(found)}' for tag, found in by_tag.items()]
    shapes = "".join(
        f'<details id="schema-{name}"><summary><code>{name}</code></summary>{_json(schema)}</details>'
        for name, schema in whole["components"]["schemas"].items()
    )
    info = whole["info"]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(info['title'])} {escape(info['version'])}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['summary'])}. "
        f'<a href="/openapi.json">openapi.json</a></p><nav>{links}</nav><main>'
    )
    tail = f'{"".join(parts)}<h2 id="schemas">schemas</h2>{shapes}</main></body></html>'
    return head, tail


def _id(tag: str) -> str:
    return tag.replace(" ", "-")


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"


def _schema(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f'<a href="#schema-{name}">{name}</a>' if name else ""


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f'<span class="m {method}">{method.upper()}</span> <code>{escape(path)}</code>']
    head = f"{parts[0]} {escape(operation['summary'])}"
    body = f"<p>{escape(operation['description'])}</p>" if "description" in operation else ""
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{p['in']}</td><td>{escape(p['description'])}</td></tr>"
        for p in operation.get("parameters", ())
    )
    if rows:
        body += f"<table><tr><th>parameter</th><th>in</th><th></th></tr>{rows}</table>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        body += f"<p>takes <code>{kind}</code> {_schema(content.get('schema', {}))}</p>"
        if "example" in content:
            body += _json(content["example"])
    rows = ""
    for status, answer in operation["responses"].items():
        kinds = ", ".join(
            f"<code>{kind}</code> {_schema(content.get('schema', {}))}"
            for kind, content in answer.get("content", {}).items()
        )
        rows += f"<tr><td>{status}</td><td>{escape(answer['description'])}</td><td>{kinds}</td></tr>"
    body += f"<table><tr><th>status</th><th></th><th>body</th></tr>{rows}</table>"
    return f"<details><summary>{head}</summary>{body}</details>"
