"""schemathesis drives the whole REST surface from /openapi.json and finds no undocumented status or shape."""

from __future__ import annotations

import copy
import json
import traceback
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.servers import example_server

schemathesis = pytest.importorskip("schemathesis", reason="run by make test-clients")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# what the generated requests name: models that are there and that are not
NAMES: dict[str, list[str]] = {
    "model": ["simple", "upper_case", "nothing"],
    "version": ["1", "2", "0", "99999999999999999999"],
    "region": ["one", "other"],
    "sequence": ["1", "ä", "none"],
}
# loaded and unloaded meanwhile
SPARE = ["identity_int32", "nothing"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with example_server("simple", "upper_case", flags=["--allow-client-shm=true"]) as server:
        yield f"http://{server.http}"


@pytest.fixture
def document(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/openapi.json", timeout=60) as answer:
        return narrowed(json.load(answer))


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the names of NAMES as the values of path parameters, so that requests meet what is there."""
    document = copy.deepcopy(document)
    for path, item in document["paths"].items():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in NAMES:
                    names = NAMES[parameter["name"]]
                    if parameter["name"] == "model" and "/repository/" in path:
                        names = SPARE
                    parameter["schema"] = {"type": "string", "enum": names}
    return document


def drive(address: str, document: dict[str, Any]) -> dict[str, set[int]]:
    """Sends requests that fit the document and some that do not; operation -> the statuses that were answered.

    Raises what schemathesis raises for an answer that the document does not describe.
    """
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=address)
    seen: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=5,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def send(case: Any) -> None:
                response = case.call_and_validate(checks=CHECKS, timeout=60)
                seen.setdefault(operation.label, set()).add(response.status_code)  # noqa: B023

            try:
                send()
            except Unsatisfiable:  # of an operation without parameters nothing can be wrong
                assert mode is GenerationMode.NEGATIVE
    return seen


def test_every_operation_answers_what_the_document_says(address: str, document: dict[str, Any]) -> None:
    seen = drive(address, document)
    assert len(seen) == sum(len(item) for item in document["paths"].values())
    assert seen["POST /v2/models/{model}/infer"] >= {400, 404}
    assert seen["GET /v2/models/{model}"] == {200, 404}


@pytest.mark.parametrize("what", ["status", "shape"])
def test_what_is_not_documented_is_found(address: str, document: dict[str, Any], what: str) -> None:
    path = "/v2/models/{model}"
    document["paths"] = {path: document["paths"][path]}
    if what == "status":
        del document["paths"][path]["get"]["responses"]["404"]
    else:
        shape = document["components"]["schemas"]["ModelMetadata"]
        del shape["properties"]["platform"]
        shape["required"].remove("platform")
    with pytest.raises(BaseExceptionGroup) as info:
        drive(address, document)
    text = "".join(traceback.format_exception(info.value))
    assert ("Received: 404" if what == "status" else "platform") in text


def test_the_examples_are_answered_as_the_document_says(address: str, document: dict[str, Any]) -> None:
    tried = 0
    for path, item in document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if operation["tags"] != ["inference"] or "{version}" in path:
                continue
            body = json.dumps(content["example"]).encode()
            url = address + path.replace("{model}", "simple")
            request = urllib.request.Request(url, body, method=method.upper())
            with urllib.request.urlopen(request, timeout=60) as answer:
                made = answer.read()
            told = operation["responses"]["200"]["content"].get("application/json", {}).get("example")
            if told is not None:
                assert json.loads(made) == told
            tried += 1
    assert tried == 4
