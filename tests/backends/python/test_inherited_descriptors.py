"""What a program that a model starts gets from the model's process: none of the descriptors that lead to the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess

LIST = """
import subprocess
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        listing = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE, text=True, check=True).stdout
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([listing], object))]) for _ in requests]
"""
PRELOAD = "\ndef preload(args):\n    pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("code", [LIST, LIST + PRELOAD], ids=["plain", "preloaded"])
def test_a_program_that_a_model_starts_inherits_no_memory_and_no_bell(tmp_path: Path, code: str) -> None:
    isolated(tmp_path, "list", code, config(outputs="OUT:TYPE_STRING:1"))
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        listing = client.infer("list", [tensor]).as_numpy("OUT")[0].decode()
    found = [line.split(" -> ")[1] for line in listing.splitlines() if " -> " in line]
    assert len(found) >= 3
    assert not [name for name in found if "memfd" in name or "eventfd" in name or "socket" in name], listing
