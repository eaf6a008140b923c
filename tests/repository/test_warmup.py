"""model_warmup: what runs before READY, what it counts, and how it fails."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

CHECKER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = []

    def execute(self, requests):
        out = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if request.request_id():
                self.seen.append([len(requests), array.tolist()])
            if array.size and array.flat[0] == 13:
                raise ValueError("thirteen")
            text = json.dumps(self.seen).encode()
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([[text]], dtype=object))]))
        return out
"""
PYTHON = (
    'backend: "python" max_batch_size: 4 input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    'output [ { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ] '
)


def sample(
    name: str, source: str, size: int = 1, count: int = 0, dims: str = "2", type: str = "TYPE_INT32"
) -> str:
    return (
        f'model_warmup [ {{ name: "{name}" batch_size: {size} count: {count} inputs {{ key: "INPUT0" value '
        f"{{ data_type: {type} dims: [ {dims} ] {source} }} }} }} ]"
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    repository: Path = tmp_path_factory.mktemp("warm")
    files = {
        "1/model.py": CHECKER,
        "warmup/five.bin": struct.pack("<2i", 5, 6),
        "warmup/bad.bin": struct.pack("<2i", 13, 0),
    }
    seen = sample("zeros", "zero_data: true", 2, 3) + sample("file", 'input_data_file: "five.bin"')
    write_model(repository, "seen", PYTHON + seen + sample("skipped", "zero_data: true", 0), files)
    random = sample("random", "random_data: true", 2, 1, "8", "TYPE_FP32")
    write_model(
        repository,
        "instances",
        identity_config(
            "TYPE_FP32", "8", 4, 1, "instance_group [ { count: 3 } ] dynamic_batching { } " + random
        ),
    )
    text = sample("text", "random_data: true", 1, 1, "3", "TYPE_STRING")
    write_model(repository, "text", identity_config("TYPE_STRING", "3", 4, 1, text))
    for name, broken in {
        "fails": sample("bad", 'input_data_file: "bad.bin"'),
        "missing": sample("none", 'input_data_file: "nowhere.bin"'),
        "outside": sample("out", 'input_data_file: "../config.pbtxt"'),
        "short": sample("short", 'input_data_file: "five.bin"', dims="3"),
        "large": sample("large", "zero_data: true", 5),
        "unset": sample("unset", ""),
    }.items():
        write_model(repository, name, PYTHON + broken, files)
    with ServerProcess(
        repository,
        "--model-control-mode=explicit",
        "--load-model=seen",
        "--load-model=instances",
        "--load-model=text",
    ) as process:
        yield process


def test_samples_run_in_order_and_count_like_ordinary_executions(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        stats = client.get_inference_statistics("seen")["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == stats["inference_count"] == 7
        assert stats["execution_count"] == 4
        assert {row["batch_size"]: row["compute_infer"]["count"] for row in stats["batch_stats"]} == {
            1: 1,
            2: 3,
        }
        tensor = httpclient.InferInput("INPUT0", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 1), dtype=np.int32))
        seen = json.loads(client.infer("seen", [tensor]).as_numpy("SEEN")[0][0])
        assert seen == [[2, [[0, 0]]]] * 6 + [[1, [[5, 6]]]]


def test_every_instance_is_warmed(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        stats = client.get_inference_statistics("instances")["model_stats"][0]
        assert (stats["inference_count"], stats["execution_count"]) == (6, 3)
        assert client.get_inference_statistics("text")["model_stats"][0]["inference_count"] == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "warmup sample 'bad' of model 'fails' failed: .*ValueError: thirteen"),
        ("missing", "names a file that is not in the folder warmup: 'nowhere.bin'"),
        ("outside", "must stay within the model's folder warmup/"),
        ("short", "input byte size mismatch for input 'INPUT0' for model 'short'. Expected 12, got 8"),
        ("large", r"expected at most max_batch_size \(4\), got 5"),
        ("unset", "needs one of zero_data, random_data and input_data_file"),
    ],
)
def test_a_failing_sample_fails_the_load_with_its_reason(
    server: ServerProcess, name: str, reason: str
) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=reason):
            client.load_model(name)
        assert not client.is_model_ready(name)


@pytest.mark.slow
def test_a_sample_that_the_disk_does_not_give_holds_up_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, given = threading.Event(), threading.Event()
    read = Path.read_bytes

    def held(path: Path) -> bytes:
        if path.name == "five.bin":
            reading.set()
            assert given.wait(120)
        return read(path)

    def load() -> None:
        with (
            httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
            pytest.raises(InferenceServerException),
        ):
            client.load_model("warm")

    monkeypatch.setattr(Path, "read_bytes", held)
    files: dict[str, str | bytes] = {"1/model.py": CHECKER, "warmup/five.bin": struct.pack("<2i", 5, 6)}
    write_model(tmp_path, "warm", PYTHON + sample("file", 'input_data_file: "five.bin"'), files)
    server = EmbeddedServer(tmp_path, model_control_mode="explicit")
    loading = threading.Thread(target=load, daemon=True)
    stopping = threading.Thread(target=server.stop, daemon=True)
    try:
        loading.start()
        assert reading.wait(60)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive()
    finally:
        given.set()
    loading.join(60)
