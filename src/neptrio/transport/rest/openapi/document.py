"""Makes the OpenAPI document of the route table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from neptrio import __version__
from neptrio.transport.rest import routes
from neptrio.transport.rest.openapi.operations import (
    ANYWHERE,
    BINARY,
    JSON,
    OPERATIONS,
    WITH_BODY,
    Operation,
)
from neptrio.transport.rest.openapi.schemas import SCHEMAS, ref

_OPTIONAL = re.compile(r"\(\?:((?:[^()]|\([^()]*\))*)\)\?")  # a part of a path that may be missing
_NAMED = re.compile(r"\(\?P<(\w+)>([^()]*)\)")
PARAMETERS = {
    "model": ("the model's name", "simple"),
    "version": ("a version, from 1 on; without it the latest", "1"),
    "region": ("the region's name", "inputs"),
    "repository": ("not supported: 501", "models"),
    "sequence": ("a sequence's id", "42"),
}
TIMING = {
    "name": "Neptrio-Timing",
    "in": "header",
    "description": "`true`: the answer tells the request's own times (docs/statistics.md)",
    "schema": {"type": "string", "enum": ["true", "false"]},
}
HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "bytes of JSON in front of binary tensors",
    "schema": {"type": "integer", "minimum": 0},
}


def templates(pattern: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The paths that a route's pattern stands for, each with the patterns of its parameters."""
    found = _OPTIONAL.search(pattern)
    if found is not None:
        yield from templates(pattern[: found.start()] + pattern[found.end() :])
        yield from templates(pattern[: found.start()] + found[1] + pattern[found.end() :])
        return
    plain = pattern.removesuffix(r"\Z").removesuffix("/?").replace("\\.", ".")
    yield _NAMED.sub(r"{\1}", plain), dict(_NAMED.findall(plain))


@cache
def document() -> dict[str, Any]:
    """The whole document. Raises KeyError for a route without an operation."""
    paths: dict[str, Any] = {}
    for verb, pattern, methods in routes.TABLE:
        for path, parameters in templates(pattern.pattern):
            item = paths.setdefault(path, {})
            given = [_parameter(name, text) for name, text in parameters.items()]
            for method in methods:
                name = "_".join((verb, method.lower(), *parameters))
                item[method.lower()] = _operation(OPERATIONS[verb, method], name, given)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "neptrio",
            "version": __version__,
            "summary": "Inference over HTTP: the KServe v2 protocol with Triton's extensions, and ours",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(o.tag for o in OPERATIONS.values())],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "with --auth-config"}
            },
        },
    }


def _parameter(name: str, pattern: str) -> dict[str, Any]:
    words, example = PARAMETERS[name]
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": words,
        "schema": {"type": "string", "minLength": 1, "pattern": f"^(?:{pattern})$"},
        "example": example,
    }


def _operation(operation: Operation, name: str, given: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": name, "summary": operation.summary, "tags": [operation.tag]}
    if operation.more:
        made["description"] = operation.more
    query = [
        {"name": key, "in": "query", "description": words, "schema": {"type": "string"}}
        for key, words in operation.query.items()
    ]
    headers = [*([TIMING] if operation.timed else ()), *([HEADER_LENGTH] if operation.binary else ())]
    if given or query or headers:
        made["parameters"] = [*given, *query, *headers]
    if operation.body:
        content: dict[str, Any] = {JSON: {"schema": ref(operation.body)}}
        if operation.example is not None:
            content[JSON]["example"] = operation.example
        if operation.binary:
            content[BINARY] = {}
        made["requestBody"] = {"required": not operation.optional, "content": content}
    errors = {**ANYWHERE, **(WITH_BODY if operation.body else {}), **operation.errors}
    made["responses"] = {
        "200": _answer(operation),
        **{str(status): _error(errors[status], operation) for status in sorted(errors)},
    }
    return made


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for kind, schema in operation.answers.items():
        content[kind] = {"schema": ref(schema)} if schema else {}
        if kind == JSON and operation.answer is not None:
            content[kind]["example"] = operation.answer
    made: dict[str, Any] = {"description": "done"}
    if content:
        made["content"] = content
    if operation.timed:
        made["headers"] = {
            "Server-Timing": {"description": "if asked for", "schema": {"type": "string"}},
        }
    return made


def _error(words: str, operation: Operation) -> dict[str, Any]:
    # a probe that says no has no body; a stream of `generate_stream` has events from the first error on
    shape = "OpenAiError" if operation.tag == "openai" else "Error"
    content: dict[str, Any] = {JSON: {"schema": ref(shape)}}
    for kind in operation.answers:
        if kind.startswith("text/"):
            content[kind] = {}
    return {"description": words, "content": content}
