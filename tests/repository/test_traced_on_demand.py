"""Trace settings of models on demand, which may be set and cleared while a model is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient import grpc as grpcclient
from tritonclient import http as httpclient
from tritonclient.utils import InferenceServerException

from tests.repository.test_on_demand import document, http_infer
from tests.support.server import ServerProcess
from tests.support.slow_models import slow_model


def test_settings_of_a_model_that_is_not_loaded(tmp_path: Path) -> None:
    slow_model(tmp_path, "m")
    with (
        ServerProcess(tmp_path, "--model-control-mode=on-demand") as server,
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        level = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"}
        assert http.update_trace_settings("m", level)["trace_level"] == ["TIMESTAMPS"]
        assert grpc.get_trace_settings("m", as_json=True)["settings"]["trace_rate"]["value"] == ["1"]
        assert http.get_trace_settings()["trace_level"] == ["OFF"]
        assert http_infer(http, "m") == [0, 1, 2]  # which loads it
        traced = document(server, "/v2/trace/recent")[1]
        assert {row["model_name"] for row in traced if "model_name" in row} == {"m"}
        http.unload_model("m")
        grpc.update_trace_settings("m", {"trace_level": None, "trace_rate": None, "trace_count": None})
        assert http.get_trace_settings("m") == http.get_trace_settings()
        with pytest.raises(InferenceServerException, match="Request for unknown model : nothing"):
            http.get_trace_settings("nothing")
