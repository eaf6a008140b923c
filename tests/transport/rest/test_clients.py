"""The real HTTP client where the raw ones do not go: compression, log settings on both protocols."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.server import ServerProcess


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_compression(lean_server: ServerProcess, algorithm: str | None) -> None:
    array = np.arange(50_000, dtype=np.float32).reshape(1, -1)
    tensor = httpclient.InferInput("INPUT0", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    with httpclient.InferenceServerClient(lean_server.http) as client:
        result = client.infer(
            "fp32",
            [tensor],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_log_settings_on_both_protocols(lean_server: ServerProcess) -> None:
    with (
        httpclient.InferenceServerClient(lean_server.http) as http,
        grpcclient.InferenceServerClient(lean_server.grpc) as grpc,
    ):
        before = http.get_log_settings()
        assert before["log_info"] is True
        try:
            answer = grpc.update_log_settings({"log_info": False, "log_verbose_level": 3}, as_json=True)
            assert answer["settings"]["log_verbose_level"] == {"uint32_param": 3}
            assert http.get_log_settings() == {**before, "log_info": False, "log_verbose_level": 3}
        finally:
            http.update_log_settings({"log_info": True, "log_verbose_level": 0})
        assert grpc.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
        with pytest.raises(InferenceServerException, match="invalid argument for log_format, got: x"):
            grpc.update_log_settings({"log_format": "x"})
