"""--model-load-retry-count: loads that fail are tried again, so often and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

CONFIG = (
    'backend: "python" input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } '
    'output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } response_cache { enable: true }'
)
FAILS = """
import pathlib


class TritonPythonModel:
    def initialize(self, args):
        attempts = pathlib.Path(args["model_repository"], "attempts")
        count = len(attempts.read_text()) if attempts.exists() else 0
        attempts.write_text("x" * (count + 1))
        if count < {0}:
            raise RuntimeError("not yet")

    def execute(self, requests):
        return []
"""


def attempts(repository: Path, model: str) -> int:
    return len((repository / model / "attempts").read_text())


@pytest.mark.slow
def test_a_load_is_tried_again(tmp_path: Path) -> None:
    for name, failures in (("at_once", 0), ("second", 1), ("third", 2), ("fourth", 3)):
        write_model(tmp_path, name, CONFIG, {"1/model.py": FAILS.format(failures)})
    with ServerProcess(tmp_path, "--model-load-retry-count=2", "--exit-on-error=false") as server:
        log = server.log()
        assert [attempts(tmp_path, name) for name in ("at_once", "second", "third", "fourth")] == [1, 2, 3, 3]
        for name, state in (("at_once", "READY"), ("third", "READY"), ("fourth", "UNAVAILABLE")):
            row = next(line for line in log.splitlines() if line.startswith(f"| {name}"))
            assert f"| {state} " in row
        until(lambda: server.log().count("is tried again, it failed: ") == 5, "five failures are logged")
        said = log.partition("loading 'second' version 1 is tried again, it failed: ")[2]
        assert "RuntimeError: not yet" in said.splitlines()[0]
        assert "response_cache of model 'second' has no effect without --cache-config" in log


def test_it_is_not_by_default(tmp_path: Path) -> None:
    write_model(tmp_path, "second", CONFIG, {"1/model.py": FAILS.format(1)})
    with ServerProcess(tmp_path, "--exit-on-error=false"):
        assert attempts(tmp_path, "second") == 1
