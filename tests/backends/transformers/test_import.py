"""`neptrio import` of Hugging Face folders, as they lie in the library's cache. `make test-backends` runs these."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from neptrio import commands
from tests.backends.transformers import tiny_models
from tests.support.http import Http1
from tests.support.server import ServerProcess

pytest.importorskip("transformers", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_folders_become_models_that_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs, snapshots, models = tmp_path / "blobs", tmp_path / "snapshots", tmp_path / "models"
    made = {
        "masks": lambda folder: tiny_models.bert(folder, "ForMaskedLM"),
        "images": tiny_models.vit,
        "text": tiny_models.llama,
    }
    for name, make in made.items():
        make(blobs / name)
        (blobs / name / "pytorch_model.bin").write_text("a pickle")
        (snapshots / name).mkdir(parents=True)
        for file in (blobs / name).iterdir():  # a cache holds links
            (snapshots / name / file.name).symlink_to(file)
        assert commands.run("import", [str(snapshots / name), "--repository", str(models)]) == 0
        said = capsys.readouterr().out
        assert f"{models}/{name}: a Hugging Face model, served by backend 'transformers'" in said
        assert "a test request (zeros) was answered:" in said
        assert f"curl {'-N ' if name == 'text' else ''}-d @" in said
        assert not (models / name / "1/pytorch_model.bin").exists()
        assert not (models / name / "1/model.safetensors").is_symlink()
    with ServerProcess(
        models, "--disable-auto-complete-config", env=dict(os.environ, PYTHONWARNINGS="")
    ) as server:
        with Http1(server.http) as http:
            for name in made:
                route = "generate_stream" if name == "text" else "infer"
                body = (models / name / "request.json").read_bytes()
                reply = http.request("POST", f"/v2/models/{name}/{route}", body)
                assert reply.status == 200, reply.body
            rows = json.loads(http.request("GET", "/v1/models").body)["data"]
    assert [row["id"] for row in rows] == ["text"]
