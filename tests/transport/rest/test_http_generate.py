"""generate and generate_stream over every HTTP front, and the logging endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import Reply
from tests.transport.rest.conftest import Connect


def post(connect: Connect, model: str, verb: str, body: Any, **headers: str) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return connect().request("POST", f"/v2/models/{model}/{verb}", data, given)


def test_generate(connect: Connect) -> None:
    reply = post(
        connect, "text", "generate", {"INPUT0": "hello", "stream": False, "n": 3, "f": 1.5, "s": "x"}
    )
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{"OUTPUT0":"hello","model_name":"text","model_version":"1"}'
    reply = post(
        connect,
        "simple/versions/1",
        "generate",
        {"INPUT1": list(range(16)), "INPUT0": [[7] * 16], "id": "g1"},
    )
    row = ",".join(map(str, range(16)))
    assert (
        reply.body
        == (
            f'{{"id":"g1","OUTPUT0":[{",".join(["7"] * 16)}],"OUTPUT1":[{row}],"model_name":"simple",'
            '"model_version":"1"}'
        ).encode()
    )
    reply = post(connect, "fp32", "generate", {"INPUT0": 0.1, "parameters": {"a": 1, "b": True, "c": "d"}})
    assert json.loads(reply.body)["OUTPUT0"] == 0.10000000149011612


def test_generate_stream(connect: Connect) -> None:
    reply = post(connect, "text", "generate_stream", {"INPUT0": "a\nb"})
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert reply.body == b'data: {"OUTPUT0":"a\\nb","model_name":"text","model_version":"1"}\n\n'


KIND = "attempt to access JSON non-object as object"


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "error"),
    [
        ("nope", b"{", 404, "Request for unknown model: 'nope' is not found"),
        ("text", b"", 400, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("text", b"[]", 400, "attempt to get members for non-object"),
        ("text", {"INPUT0": ["a", "b"]}, 400, "The schema can not convert input 'INPUT0' to tensor with proper shape"),
        ("simple", {"INPUT0": [1] * 15}, 400, "The schema can not convert input 'INPUT0' to tensor with proper shape"),
        ("matrix", {"INPUT0": [1]}, 400, "The schema can not convert input 'INPUT0' to tensor with proper shape"),
        ("text", {"INPUT0": "a", "nul": None}, 400, "parameter 'nul' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("text", {"INPUT0": "a", "parameters": {"x": []}}, 400, "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("text", {"INPUT0": "a", "x": []}, 400, "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("text", {"INPUT": ["a"]}, 400, "parameter 'INPUT' has invalid type. It should be either 'int', 'bool', or 'string'. It is no input, either, did you mean 'INPUT0'?"),
        ("text", {"INPUT0": "a", "parameters": 1}, 400, f"Expected JSON object for keyword: 'parameters': {KIND}"),
        ("text", b'{"INPUT0":"a","INPUT0":"a"}', 400, "[request id: <id_unknown>] input 'INPUT0' already exists in request"),
        ("text", b'{"id":"i","INPUT0":"a","x":1,"x":2,"INPUT0":"b"}', 400, "[request id: i] input 'INPUT0' already exists in request"),
        ("text", {"INPUT0": 5}, 400, "The schema can not convert input 'INPUT0' to tensor: Unable to parse JSON bytes array: attempt to access JSON non-string as string: input 'INPUT0' is BYTES"),
        ("text", {}, 400, "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'text'. Got input(s) [], but missing required input(s) ['INPUT0']. Please provide all required input(s)."),
    ],
)  # fmt: skip
def test_refusals(connect: Connect, verb: str, model: str, body: Any, status: int, error: str) -> None:
    reply = post(connect, model, verb, body)
    assert (reply.status, json.loads(reply.body)) == (status, {"error": error})
    assert reply.headers["content-type"] == "application/json"


def test_of_a_repeated_parameter_the_first_counts(connect: Connect) -> None:
    reply = post(connect, "text", "generate", b'{"id":"first","id":"second","INPUT0":"a","x":1,"x":2}')
    assert (reply.status, json.loads(reply.body)["id"]) == (200, "first")


def test_only_plain_bodies(connect: Connect) -> None:
    reply = post(connect, "text", "generate", {"INPUT0": "a"}, Content_Encoding="gzip")
    assert reply.status == 400
    assert json.loads(reply.body) == {"error": "Unsupported content-encoding, only 'identity' is supported."}
    assert post(connect, "text", "generate", {"INPUT0": "a"}, Content_Encoding="identity").status == 200


DEFAULTS = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip


def test_logging_settings(connect: Connect) -> None:
    connection = connect()
    assert json.loads(connection.request("GET", "/v2/logging").body) == DEFAULTS
    changed = connection.request(
        "POST", "/v2/logging", b'{"log_verbose_level":2,"log_warning":false,"x":1,"log_info":null}'
    )
    assert json.loads(changed.body) == {**DEFAULTS, "log_verbose_level": 2, "log_warning": False}
    assert json.loads(connection.request("GET", "/v2/logging").body)["log_verbose_level"] == 2
    restored = connection.request(
        "POST", "/v2/logging", json.dumps({k: v for k, v in DEFAULTS.items() if k != "log_file"}).encode()
    )
    assert restored.body == json.dumps(DEFAULTS, separators=(",", ":")).encode()
    assert json.loads(connection.request("POST", "/v2/logging", b"[]").body) == DEFAULTS


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", 400, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"[1]", 400, "attempt to get members for non-object, got: [1]"),
        (b'{"log_info":false,"log_file":"x"}', 501, "log file location can not be updated through network protocol"),
        (b'{"log_error":false,"log_info":1}', 400, "attempt to access JSON non-boolean as boolean"),
        (b'{"log_verbose_level":-1}', 400, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (b'{"log_verbose_level":5000000000}', 400, "'log_verbose_level' is out of range [0, 4294967295], got: 5000000000"),
        (b'{"log_format":1}', 400, "attempt to access JSON non-string as string"),
        (b'{"log_error":false,"log_format":"iso"}', 503, "invalid argument for --log_format, got: iso"),
    ],
)  # fmt: skip
def test_logging_refusals_change_nothing(connect: Connect, body: bytes, status: int, error: str) -> None:
    connection = connect()
    reply = connection.request("POST", "/v2/logging", body)
    assert (reply.status, json.loads(reply.body)) == (status, {"error": error})
    assert json.loads(connection.request("GET", "/v2/logging").body) == DEFAULTS
