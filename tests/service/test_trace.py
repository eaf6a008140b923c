"""Trace settings on a server that was started without any flag for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model

BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": [0] * 16}]})


def post(client: Http1, path: str, body: object) -> tuple[int, dict[str, object]]:
    answer = client.request("POST", path, json.dumps(body).encode())
    return answer.status, json.loads(answer.body)


def test_traces_into_memory_and_then_into_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "models", "m", identity_config(pairs=1))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "traces"
    with EmbeddedServer(tmp_path / "models") as server, Http1(server.http) as client:
        assert post(client, "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})[0] == 200
        assert client.request("POST", "/v2/models/m/infer", BODY.encode()).status == 200
        (trace,) = json.loads(client.request("GET", "/v2/trace/recent").body)
        assert trace["model_name"] == "m" and not folder.exists()
        status, answer = post(client, "/v2/trace/setting", {"trace_file": "../t.json"})
        assert status == 400 and not folder.exists()
        status, answer = post(client, "/v2/trace/setting", {"trace_file": "t.json"})
        assert (status, answer["trace_file"]) == (200, f"{folder}/t.json")
        assert client.request("POST", "/v2/models/m/infer", BODY.encode()).status == 200
        # a name that was shown may be sent again
        assert (
            post(client, "/v2/trace/setting", {"trace_level": ["OFF"], "trace_file": f"{folder}/t.json"})[0]
            == 200
        )
        (trace,) = json.loads((folder / "t.json").read_text())
        assert trace["model_name"] == "m"
