"""`neptrio demo`: the example models, without anything to prepare."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import tritonclient.http as http_client

from tests.support.server import ServerProcess


def test_the_example_models_are_served() -> None:
    with (
        ServerProcess(None, command=("demo",)) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        names = {row["name"] for row in client.get_model_repository_index()}
        assert {"identity_fp32", "mean", "upper_case"} <= names
        assert ("simple" in names) == any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        text = http_client.InferInput("TEXT", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([["hello"]], object))
        assert client.infer("upper_case", [text]).as_numpy("UPPER").tolist() == [[b"HELLO"]]
        assert "a first request:\n  curl -s http://127.0.0.1:" in server.log()


def test_a_wrong_flag_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "neptrio", "demo", "--nonsense"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
