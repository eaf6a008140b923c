"""--http-lean=false: how long a body may take to come, and what else is on the connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gate import Gate
from tests.support.raw_http2 import RawClient
from tests.support.server import ServerProcess

JSON = b'{"id": "r", "inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}'
PATH = "/v2/models/gate/infer"


@pytest.mark.slow
def test_a_body_that_does_not_come_ends_its_own_request_only(tmp_path: Path) -> None:
    """Over HTTP/2, where another request executes for longer than a body may take."""
    gate = Gate(tmp_path / "repository", tmp_path / "gate")
    with (
        ServerProcess(
            tmp_path / "repository", "--http-lean=false", "--http-request-timeout-secs=1"
        ) as server,
        RawClient(server.http) as client,
    ):

        def head(stream: int, length: int) -> bytes:
            fields = {"te": None, "content-type": "application/json", "user-agent": None}
            return client.headers(stream, PATH, [("content-length", str(length))], override=fields)

        client.send(head(1, len(JSON)) + client.data(1, JSON))
        assert gate.started() == ["r"]
        client.send(head(3, 1000) + client.data(3, JSON, end=False))
        late = b'{"error":"the request did not arrive in time"}'
        client.until(lambda: client.replies[3].data == late, "the whole refusal")
        assert client.replies[3].headers[0][":status"] == "408"
        client.until(lambda: client.replies[3].done, "its end")
        assert not client.replies[1].headers
        gate.go()
        assert client.finish(1).headers[0][":status"] == "200"
        assert client.goaway is None
    gate.close()
