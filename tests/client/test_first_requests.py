"""The first requests a user makes, with the real clients against a real server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "identity", identity_config())
    with ServerProcess(repository) as process:
        yield process


@pytest.mark.parametrize("binary", [True, False])
def test_http(server: ServerProcess, binary: bool) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("identity")
        outputs = [httpclient.InferRequestedOutput("OUTPUT1", binary_data=binary)]
        result = client.infer("identity", identity_inputs(httpclient), outputs=outputs, request_id="a1")
        assert result.get_response()["id"] == "a1"
        np.testing.assert_array_equal(
            result.as_numpy("OUTPUT1"), np.arange(1, 17, dtype=np.int32).reshape(1, 16)
        )
        assert result.as_numpy("OUTPUT0") is None


@pytest.mark.slow
def test_grpc(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("identity")
        result = client.infer("identity", identity_inputs(grpcclient), request_id="b1")
        assert result.get_response().id == "b1"
        np.testing.assert_array_equal(
            result.as_numpy("OUTPUT1"), np.arange(1, 17, dtype=np.int32).reshape(1, 16)
        )


def test_grpc_stream(server: ServerProcess) -> None:
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for i in range(10):
            client.async_stream_infer("identity", identity_inputs(grpcclient), request_id=str(i))
        for i in range(10):
            result, error = results.get(timeout=60)
            assert error is None
            assert result.get_response().id == str(i)
        client.stop_stream()


def test_unknown_model(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            client.infer("nope", identity_inputs(httpclient))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(
            InferenceServerException, match="Request for unknown model: 'nope' is not found"
        ) as info:
            client.infer("nope", identity_inputs(grpcclient))
        assert info.value.status() == "StatusCode.NOT_FOUND"


def test_statistics_agree_on_both_protocols(server: ServerProcess) -> None:
    with (
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        http.infer("identity", identity_inputs(httpclient))
        plain = http.get_inference_statistics("identity")["model_stats"][0]
        message = grpc.get_inference_statistics("identity").model_stats[0]
        assert plain["inference_stats"]["success"]["count"] == message.inference_stats.success.count > 0
        assert plain["execution_count"] == message.execution_count


def test_sigterm_exits_cleanly(tmp_path: Path) -> None:
    write_model(tmp_path, "identity", identity_config())
    process = ServerProcess(tmp_path)
    assert process.stop() == 0
