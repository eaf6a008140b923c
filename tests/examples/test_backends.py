"""Examples of backends that packages bring: trees that are trained here, and a real network on OpenVINO."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import neptrio
from tests.examples.test_examples import EXAMPLES, load

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(EXAMPLES / "trees.py").main(tmp_path / "not" / "there") == 1
    assert "tumors are classified rightly" in capsys.readouterr().out


def test_the_command_of_the_page_serves_a_real_network(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    (command,) = re.findall(
        r"```bash\n(neptrio import.*?)```", (EXAMPLES.parent / "docs/openvino.md").read_text(), re.S
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, env={**os.environ, "PATH": path})
    folder = tmp_path / "models/file_type"
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    (wanted,), (given,) = session.get_inputs(), session.get_outputs()
    rows = np.random.default_rng(1).integers(0, 256, (3, wanted.shape[1])).astype(np.int32)
    with neptrio.Server(tmp_path / "models").running() as server:
        model = server.model("file_type")
        assert model.config()["backend"] == "openvino"
        found = model.infer({wanted.name: rows})[given.name]
    np.testing.assert_allclose(found, session.run(None, {wanted.name: rows})[0], 1e-3, 1e-5)
