"""Passive instances, of a compiled backend and of a Python model: they are initialized and finalized, and execute nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.backends.compiled.asking import TEXT
from tests.support.repository import write_model
from tests.support.server import ServerProcess

pytestmark = pytest.mark.slow

GROUPS = 'instance_group [ { name: "works" count: 1 kind: KIND_CPU }, { name: "waits" count: 2 kind: KIND_CPU passive: true } ] '
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        pb_utils.Logger.log_info(f"python: begins {self.name}")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([[self.name]], object))]) for _ in requests]

    def finalize(self):
        pb_utils.Logger.log_info(f"python: ends {self.name}")
"""


def test_passive_instances_are_loaded_and_execute_nothing(backends: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "compiled", TEXT + GROUPS)
    python = TEXT.replace('"probe"', '"python"') + GROUPS
    here = 'parameters { key: "isolation" value: { string_value: "none" } }'
    write_model(tmp_path, "apart", python, {"1/model.py": MODEL})
    write_model(tmp_path, "here", python + here, {"1/model.py": MODEL})
    names = ("compiled", "apart", "here")
    server = ServerProcess(
        tmp_path,
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in names),
    )
    with grpc.InferenceServerClient(server.grpc) as client:
        log = server.log()
        assert log.count("probe: passive waits_") == 2, "the backend is told so"
        assert log.count("python: begins waits_") == 4 and log.count("python: begins works_0") == 2
        for name in names:
            groups = client.get_model_config(name).config.instance_group
            assert [(group.count, group.passive) for group in groups] == [(1, False), (2, True)]
            assert executed_by(client, name) == {"works_0"}
        # a change in place: those that were passive end, and others serve
        (tmp_path / "apart" / "config.pbtxt").write_text(
            'name: "apart" ' + python.replace("passive: true", "")
        )
        client.load_model("apart")
        assert "works_0" in executed_by(client, "apart")
        server.until_logged("python: ends waits_", 2)
        for name in names:
            client.unload_model(name)
        server.until_logged("python: ends waits_", 6)
        server.until_logged("the probe's instance ends", 3)
    server.stop()


def executed_by(client: Any, model: str) -> set[str]:
    tensor = grpc.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.int32))

    def infer(_: int) -> str:
        found = client.infer(model, [tensor], parameters={"do": "hold 1"})
        return str(found.as_numpy("TEXT")[0, 0].decode().split()[0])

    with ThreadPoolExecutor(8) as threads:
        return set(threads.map(infer, range(24)))
