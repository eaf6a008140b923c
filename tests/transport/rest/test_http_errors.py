"""Every refusal of docs/protocol/observed.md 1 to 4 with its status and text, over every HTTP front."""

from __future__ import annotations

import json

import pytest

from tests.transport.rest import refused_binary, refused_json
from tests.transport.rest.conftest import Connect
from tests.transport.rest.refusals import both

CASES = [*refused_json.CASES, *refused_binary.CASES]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "error"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_infer_refusals(
    connect: Connect, path: str, body: bytes, headers: dict[str, str], status: int, error: str
) -> None:
    reply = connect().request("POST", path, body, headers)
    assert (reply.status, json.loads(reply.body)) == (status, {"error": error})
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v2/health/live", 200, b""),
        ("GET", "/v2/health/ready", 200, b""),
        ("GET", "/v2/health/live/", 404, b'{"error":"Not Found: GET /docs lists what there is"}'),
        ("GET", "/v2/Health/live", 404, b'{"error":"Not Found: GET /docs lists what there is"}'),
        ("GET", "/nowhere", 404, b'{"error":"Not Found: GET /docs lists what there is"}'),
        ("GET", "/metrics", 404, b'{"error":"Not Found: that is on the port of --metrics-port (8002)"}'),
        ("GET", "/v2/models", 404, b'{"error":"Not Found: POST /v2/repository/index lists the models"}'),
        (
            "GET",
            "/healthz",
            404,
            b'{"error":"Not Found: GET /v2/health/live and /v2/health/ready are the probes"}',
        ),
        ("POST", "/v2/health/live", 405, b'{"error":"Method Not Allowed: this path takes GET"}'),
        ("GET", "/v2/models/simple/infer", 405, b'{"error":"Method Not Allowed: this path takes POST"}'),
        ("GET", "/v2/models/simple/generate", 405, b'{"error":"Method Not Allowed: this path takes POST"}'),
        ("HEAD", "/v2/health/live", 405, b""),
        ("GET", "/v2/models/simple/ready", 200, b""),
        ("GET", "/v2/models/simple/ready?x=y", 200, b""),
        ("GET", "/v2/models/simple/versions/01/ready", 200, b""),
        ("GET", "/v2/models/nope/ready", 400, b'{"error":"Model version not ready"}'),
        ("GET", "/v2/models/simple/versions/9/ready", 400, b'{"error":"Model version not ready"}'),
        (
            "GET",
            "/v2/models/simple/versions/abc/ready",
            404,
            b'{"error":"failed to get model version from specified version string \'abc\' (details: stol), version should '
            b'be an integral value > 0"}',
        ),
        (
            "GET",
            "/v2/models/simple/versions/-1",
            404,
            b'{"error":"Not Found: GET /docs lists what there is"}',
        ),
        ("GET", "/v2/models/nope", 404, b'{"error":"Request for unknown model: \'nope\' is not found"}'),
        (
            "GET",
            "/v2/models/nope/config",
            404,
            b'{"error":"Request for unknown model: \'nope\' is not found"}',
        ),
        ("GET", "/v2/models/nope/stats", 400, b'{"error":"requested model \'nope\' is not available"}'),
        ("GET", "/v2/repository/index", 405, b'{"error":"Method Not Allowed: this path takes POST"}'),
        (
            "POST",
            "/v2/models/nope/generate",
            404,
            b'{"error":"Request for unknown model: \'nope\' is not found"}',
        ),
    ],
)
def test_routes(connect: Connect, method: str, path: str, status: int, body: bytes) -> None:
    reply = connect().request(method, path)
    assert (reply.status, reply.body) == (status, body)
    if body:
        assert reply.headers["content-type"] == "application/json"
    if status == 405:
        assert reply.headers["allow"] == ("GET" if path.startswith("/v2/health") else "POST")
    if reply.version == "HTTP/1.1" and status == 405:
        assert reply.reason in ("Not Allowed", "")


def test_a_refused_connection_goes_on(connect: Connect) -> None:
    connection = connect()
    for _ in range(3):
        assert connection.request("POST", "/v2/models/simple/infer", b"{").status == 400
        assert connection.request("POST", "/v2/models/simple/infer", both()).status == 200
