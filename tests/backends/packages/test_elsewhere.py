"""Folders for backends that only a Triton server has are refused with what to do with their models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neptrio.backends import elsewhere, packages, registry
from neptrio.config import model_config
from neptrio.errors import InvalidArgument
from neptrio.settings import Settings
from tests.support.repository import write_model


@pytest.mark.parametrize("name", elsewhere.WAYS)
def test_each_says_what_can_be_done_in_lines_to_copy(name: str, tmp_path: Path) -> None:
    config = model_config.parse_text(f'backend: "{name}"', "config.pbtxt")
    with pytest.raises(InvalidArgument) as refused:
        registry.find_for(config, Settings(model_repository=(tmp_path,)))
    assert str(refused.value) == elsewhere.way(name)
    assert str(refused.value).startswith(f"backend '{name}' is not part of this server: ")
    # what it says to write into config.pbtxt can be written there
    for text in re.findall(r'backend: "\w+"|optimization \{.*?\} \} \}', str(refused.value)):
        model_config.parse_text(text, "config.pbtxt")
    for other in re.findall(r'backend: "(\w+)"', str(refused.value)):
        assert other in registry.names()


def test_what_is_there_is_not_in_the_table() -> None:
    assert not set(elsewhere.WAYS) & set(registry.names())
    assert {entry.name for entry in packages.installed()} >= {"fil", "openvino", "pytorch"}


@pytest.mark.slow
def test_a_repository_of_a_triton_server_is_told_model_by_model(tmp_path: Path) -> None:
    for name, text, file in (
        ("plan", 'platform: "tensorrt_plan"', "model.plan"),
        ("saved", 'platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb"),
        ("images", 'backend: "dali"', "model.dali"),
        ("bare", "", "model.plan"),
    ):
        write_model(tmp_path, name, text, {f"1/{file}": b"x"})
    command = [sys.executable, "-m", "neptrio", "check", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {m["name"]: [p["message"] for p in m["problems"]] for m in json.loads(done.stdout)["models"]}
    for name, backend in (
        ("plan", "tensorrt"),
        ("saved", "tensorflow"),
        ("images", "dali"),
        ("bare", "tensorrt"),
    ):
        assert elsewhere.way(backend) in found[name]
