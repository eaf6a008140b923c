"""A thread that a model in the server's process has left behind, and that asks the server while it ends and after that: it gets
an error, and the process, which waits for such a thread, ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.python.models import isolated
from tests.support.server import ServerProcess

ASKS = """
import contextvars
import os
from concurrent.futures import ThreadPoolExecutor
import numpy as np

def infer(decoupled):
    given = [pb_utils.Tensor("IN", np.ones(1, np.float32))]
    call = pb_utils.InferenceRequest(model_name="asks", inputs=given, requested_output_names=["OUT"])
    answer = call.exec(decoupled=decoupled)
    for response in answer if decoupled else [answer]:
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())

def ask():
    while True:
        try:
            WISH
        except pb_utils.TritonModelException as error:
            if "has stopped" in str(error):
                os.write(2, f"told: {error}\\n".encode())  # in one piece, beside the server's log
                return

class TritonPythonModel:
    def initialize(self, args):
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(contextvars.copy_context().run, ask)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wish",
    [
        'pb_utils.is_model_ready("asks")',
        'pb_utils.load_model("asks")',
        "infer(False)",
        "infer(True)",
    ],
)
def test_the_server_ends(tmp_path: Path, wish: str) -> None:
    isolated(tmp_path, "asks", ASKS.replace("WISH", wish), way="none")
    server = ServerProcess(tmp_path)
    assert server.stop() == 0
    assert "told: the server has stopped\n" in server.log()
