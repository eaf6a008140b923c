"""A system without what rings need: models in processes of their own are refused with the reason, others serve."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

from tests.backends.python.models import isolated
from tests.support.server import ServerProcess, without_front_ends

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@without_front_ends  # which need the same
def test_a_process_of_its_own_is_refused_with_the_reason(tmp_path: Path) -> None:
    site, repository = tmp_path / "site", tmp_path / "repository"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import fcntl\ndel fcntl.F_ADD_SEALS\n")
    isolated(repository, "own", ECHO)
    isolated(repository, "here", ECHO, way="none")
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}
    with (
        ServerProcess(repository, "--exit-on-error=false", env=env) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        state = {row["name"]: row for row in client.get_model_repository_index()}
        assert state["own"]["state"] == "UNAVAILABLE"
        assert (
            "'own_0' cannot have a process of its own: this system has no memory files"
            in state["own"]["reason"]
        )
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.array([7], np.float32))
        assert client.infer("here", [tensor]).as_numpy("OUT")[0] == 7
