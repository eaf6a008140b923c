"""`neptrio explain` as a command, on a repository and on a running server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.support import onnx_models
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        raise NotImplementedError
"""


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "neptrio", "explain", *arguments], capture_output=True, text=True, timeout=60
    )
    return done.returncode, " ".join(done.stdout.split()), done.stderr


@pytest.mark.slow
def test_it_reads_a_repository(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config(extra="dynamic_batching { }"))
    status, out, _ = run("m", f"--model-repository={tmp_path}")
    assert status == 0 and "Requests to 'm' batch up to a sum of 8 (max_batch_size)" in out
    status, _, err = run("nope", f"--model-repository={tmp_path}")
    assert status == 1 and f"there is no model 'nope' in {tmp_path}" in err
    levels = "dynamic_batching { priority_levels: 3 default_priority_level: 9 }"
    write_model(tmp_path, "refused", identity_config(extra=levels))
    status, out, err = run("refused", f"--model-repository={tmp_path}")
    assert status == 1 and out == "" and "default_priority_level" in err, (
        "what no server loads is not explained"
    )


@pytest.mark.slow
def test_it_asks_a_server_and_tells_what_happened_so_far(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config(pairs=1, extra="dynamic_batching { }"))
    with ServerProcess(tmp_path) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            tensor = httpclient.InferInput("INPUT0", [1, 16], "INT32")
            tensor.set_data_from_numpy(np.zeros((1, 16), np.int32))
            client.infer("m", [tensor])
        status, out, _ = run("m", f"--url={server.http}")
        assert status == 0 and "So far 1 batch was closed: idle 1 (100 %, mean size 1.0" in out
        status, _, err = run("nope", f"--url={server.http}")
        assert status == 1 and "Request for unknown model: 'nope' is not found" in err


@pytest.mark.slow
def test_a_repository_says_what_a_server_says_of_what_is_completed(tmp_path: Path) -> None:
    """Nothing is written of these models: tensors and batching come out of their files, and of the code in them."""
    write_model(tmp_path, "plain", "", {"1/model.onnx": onnx_models.identity(shape=("N", 4))})
    write_model(tmp_path, "own", "", {"1/model.py": COMPLETES})
    write_model(
        tmp_path, "broken", "", {"1/model.py": COMPLETES.replace("return config", "raise OSError(5)")}
    )
    names = ("plain", "own")
    of_folder = [run(name, f"--model-repository={tmp_path}") for name in names]
    status, out, err = run("broken", f"--model-repository={tmp_path}")
    assert status == 1 and out == "" and "OSError: 5" in err and "Traceback" not in err
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        of_server = [run(name, f"--url={server.http}") for name in names]
    for name, there, here in zip(names, of_folder, of_server, strict=True):
        assert there[0] == 0 and there[1].partition(" So far")[0] == here[1].partition(" So far")[0]
        assert f"Requests to '{name}' batch up to" in there[1] and there[2] == ""


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named() -> None:
    status, _, err = run("m", "--url=127.0.0.1:1")
    assert status == 1 and "urlopen" not in err
    assert "no answer from a server at 127.0.0.1:1: " in err and "--url=HOST:PORT" in err
