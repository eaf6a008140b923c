"""docs/tutorial.md is done as it stands: its files are written, its commands run, its requests sent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.examples.test_examples import blocks
from tests.support import onnx_models
from tests.support.server import ServerProcess

PAGE = "docs/tutorial.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page, each of which begins with a comment that is its path."""
    for text in blocks(PAGE, "python"):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, "a file of the tutorial begins with its path"
        path = tmp_path / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = tmp_path / "models/mine/1/model.onnx"  # the reader's own
    path.parent.mkdir(parents=True)
    path.write_bytes(onnx_models.identity(shape=("N", 4)))
    return tmp_path


def commands(word: str) -> list[str]:
    return [line for text in blocks(PAGE, "") for line in text.splitlines() if line.startswith(word)]


@pytest.mark.slow
def test_the_models(folder: Path) -> None:
    def neptrio(*arguments: str) -> str:
        command = [sys.executable, "-m", "neptrio", *arguments]
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    (check,) = commands("neptrio check")
    assert "2 models: 2 without errors; 0 errors, 0 warnings" in neptrio(*check.split()[1:])
    with ServerProcess(folder / "models") as server:
        (request,) = commands("curl")
        done = subprocess.run(
            request.replace("localhost:8000", server.http),
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert json.loads(done.stdout)["outputs"][0]["data"] == ["HELLO!"]
        with httpclient.InferenceServerClient(server.http) as client:
            given = httpclient.InferInput("X", [1, 4], "FP32")
            given.set_data_from_numpy(np.ones((1, 4), np.float32))
            assert client.infer("mine", [given]).as_numpy("Y").tolist() == [[1, 1, 1, 1]]
        (explain, _) = commands("neptrio explain")
        assert "Requests to 'shout' batch up to" in " ".join(
            neptrio(*explain.split()[1:], f"--url={server.http}").split()
        )


@pytest.mark.slow
def test_the_function(folder: Path) -> None:
    (serve,) = commands("neptrio serve")
    assert serve == "neptrio serve app.py:server --reload"
    with (
        ServerProcess(None, command=("serve", f"{folder}/app.py:server")) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        name = httpclient.InferInput("name", [1], "BYTES")
        name.set_data_from_numpy(np.array(["you"], object))
        assert client.infer("greet", [name]).as_numpy("OUTPUT").tolist() == [b"hello you"]
