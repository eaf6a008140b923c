"""docs/backends.md builds a backend from nothing: here its files are written, installed and served as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.http import Http1
from tests.support.server import ServerProcess

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"


def files() -> dict[str, str]:
    """The files of the page: the last name in backticks before a block -> the block."""
    section = PAGE.read_text().partition("## From nothing")[2].partition("\n## ")[0]
    return {
        re.findall(r"`([\w./-]+/[\w.-]+)`", before)[-1]: block
        for before, block in re.findall(r"(.*?)```(?:toml|python)?\n(.*?)```", section.partition("```bash")[0], re.S)
    }  # fmt: skip


@pytest.mark.slow
def test_the_backend_of_the_page_is_installed_and_serves(tmp_path: Path) -> None:
    written = files()
    assert set(written) == {
        "neptrio-linear/pyproject.toml",
        "neptrio-linear/neptrio_linear/model.py",
        "models/twice/config.pbtxt",
    }
    assert sum(text.count("\n") for text in written.values()) <= 60
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    page = PAGE.read_text()
    commands = page.partition("```bash\n")[2].partition("```")[0]
    (tmp_path / "models/twice/1").mkdir()
    (made,) = re.findall(r"^python -c '(.*)'$", commands, re.M)
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path, check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "--no-build-isolation", f"--target={site}", tmp_path / "neptrio-linear"], check=True
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    (body, path) = re.findall(r"^curl -d '(.*)' localhost:8000(\S+)$", commands, re.M)[0]
    with ServerProcess(tmp_path / "models", env=environment) as server, Http1(server.http) as http:
        reply = http.request("POST", path, body.encode())
        assert reply.status == 200, reply.body
        (output,) = json.loads(reply.body)["outputs"]
        assert f"The answer's `Y` is `{output['data']}`." in page
        config = json.loads(http.request("GET", "/v2/models/twice/config").body)
        assert (config["backend"], config["max_batch_size"]) == ("linear", 64)
        assert config["default_model_filename"] == ""
        # a batch of several rows, which the page's numbers do not show
        rows = np.arange(6, dtype=np.float32).reshape(3, 2)
        asked = {"name": "X", "datatype": "FP32", "shape": [3, 2], "data": rows.ravel().tolist()}
        reply = http.request("POST", path, json.dumps({"inputs": [asked]}).encode())
        assert json.loads(reply.body)["outputs"][0]["data"] == (2 * rows).ravel().tolist()
