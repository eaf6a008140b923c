"""examples/functions.py, as a program and served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.http as http_client

from tests.support.server import ServerProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "functions.py"


@pytest.mark.slow
def test_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "hello you",
        "['one', 'two', 'three']",
        "[[[1.0, 2.0]], [[2.0, 3.0]], [[3.0, 4.0]], [[4.0, 5.0]]]",
        "[-1.225, 0.0, 1.225]",
    ]


@pytest.mark.slow
def test_served() -> None:
    with ServerProcess(None, "--metrics-port=0", command=("serve", f"{EXAMPLE}:server")) as server:
        with http_client.InferenceServerClient(server.http) as client:
            assert client.is_server_ready()
            index = client.get_model_repository_index()
            assert {row["name"]: row["state"] for row in index} == dict.fromkeys(
                ["add", "greet", "normalize", "words"], "READY"
            )
