"""Python models that answer when the test says so, for every route that has an answer of its own kind: `talks` (decoupled,
text in and out, OpenAI's completions and chats) and `embeds` (one answer, OpenAI's embeddings, plain infer).

A byte of the pipe `go` is r for a response, e for the end of the request; `embeds` takes an r and an e. A line of `started`
is a request that has begun, one of `ended` a request of which nothing more comes.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from tests.support.openai_models import role
from tests.support.repository import write_model

MODEL = """
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = config["parameters"]["folder"]["string_value"]
        self.name = config["name"]
        self.started, self.go, self.ended = (
            os.open(os.path.join(folder, name), os.O_RDWR) for name in ("started", "go", "ended")
        )

    def execute(self, requests):
        (request,) = requests
        os.write(self.started, b"\\n")
        if self.name == "embeds":
            os.read(self.go, 2)
            made = [pb_utils.InferenceResponse([pb_utils.Tensor("E", np.ones((1, 2), np.float32))])]
        else:
            made = None
            sender = request.get_response_sender()
            while os.read(self.go, 1) == b"r":
                piece = np.array([b"word "], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("T", piece)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        os.write(self.ended, b"\\n")
        return made

    def finalize(self):
        for pipe in (self.started, self.go, self.ended):
            os.close(pipe)
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Talking:
    """The test's side of the pipes."""

    def __init__(self, repository: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pipes: dict[str, int] = {}
        for pipe in ("started", "go", "ended"):
            os.mkfifo(folder / pipe)
            self._pipes[pipe] = os.open(folder / pipe, os.O_RDWR)
        place = f'parameters {{ key: "folder" value {{ string_value: "{folder}" }} }} '
        place += 'parameters { key: "isolation" value { string_value: "none" } } backend: "python" '
        talks = (
            place + "model_transaction_policy { decoupled: true } "
            'input [ { name: "P" data_type: TYPE_STRING dims: [ 1 ] } ] '
            'output [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ] '
            + role("prompt", "P")
            + role("text", "T")
            + role("chat_template", "chat.jinja")
        )
        write_model(repository, "talks", talks, {"1/model.py": MODEL, "chat.jinja": TEMPLATE})
        embeds = (
            place + "max_batch_size: 1 "
            "dynamic_batching { default_queue_policy { max_queue_size: 1 } } "
            'input [ { name: "P" data_type: TYPE_STRING dims: [ 1 ] } ] '
            'output [ { name: "E" data_type: TYPE_FP32 dims: [ 2 ] } ] '
            + role("input", "P")
            + role("embedding", "E")
        )
        write_model(repository, "embeds", embeds, {"1/model.py": MODEL})

    def _line(self, pipe: str) -> None:
        ready, _, _ = select.select([self._pipes[pipe]], [], [], 60)
        assert ready, f"nothing came through '{pipe}'"
        assert os.read(self._pipes[pipe], 1) == b"\n"

    def started(self) -> None:
        """Waits until a request has begun."""
        self._line("started")

    def ended(self) -> None:
        """Waits until a request has ended in its model."""
        self._line("ended")

    def go(self, what: str) -> None:
        """Lets the model go on."""
        os.write(self._pipes["go"], what.encode())

    def close(self) -> None:
        """Closes the test's ends."""
        for pipe in self._pipes.values():
            os.close(pipe)
