"""A Python model that executes only when the test says so.

There are named pipes in a folder. When a batch begins, the model writes a line to `started` (the batch's size, then the
request ids) and waits for one byte from `go`: k answers everything; c does so once a request of the batch is
cancelled; f raises an error for the whole batch; 1 fails the batch's first request only. Then it writes a line to
`reported`: the ids of the requests that it sees as cancelled.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.repository import write_model

MODEL = """
import json
import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = json.loads(args["model_config"])["parameters"]["folder"]["string_value"]
        self.started, self.go, self.reported = (
            os.open(os.path.join(folder, name), os.O_RDWR) for name in ("started", "go", "reported")
        )

    def execute(self, requests):
        ids = " ".join(request.request_id() for request in requests)
        os.write(self.started, f"{len(requests)} {ids}\\n".encode())
        what = os.read(self.go, 1)
        if what == b"c":
            until_cancelled(*requests)
        gone = " ".join(request.request_id() for request in requests if request.is_cancelled())
        os.write(self.reported, f"{gone}\\n".encode())
        if what == b"f":
            raise ValueError("the whole batch fails")
        responses = []
        for number, request in enumerate(requests):
            if what == b"1" and number == 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("this one fails")))
            else:
                array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses

    def finalize(self):
        for pipe in (self.started, self.go, self.reported):
            os.close(pipe)
"""


class Gate:
    """The test's side of a gated model's pipes."""

    def __init__(
        self,
        repository: Path,
        folder: Path,
        name: str = "gate",
        extra: str = "dynamic_batching { }",
        size: int = 8,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pipes: dict[str, int] = {}
        self._rest: dict[str, bytes] = {"started": b"", "reported": b""}
        for pipe in ("started", "go", "reported"):
            os.mkfifo(folder / pipe)
            self._pipes[pipe] = os.open(folder / pipe, os.O_RDWR)
        write_model(
            repository,
            name,
            f'backend: "python" max_batch_size: {size} '
            'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
            'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
            f'parameters {{ key: "folder" value {{ string_value: "{folder}" }} }} {extra} '
            # in the server's process, where few batches are prepared in advance for an instance
            + (
                ""
                if "isolation" in extra
                else 'parameters { key: "isolation" value { string_value: "none" } }'
            ),
            {"1/model.py": UNTIL_CANCELLED + MODEL},
        )

    def _line(self, pipe: str) -> str:
        while b"\n" not in self._rest[pipe]:
            ready, _, _ = select.select([self._pipes[pipe]], [], [], 60)
            assert ready, f"nothing came through '{pipe}'"
            self._rest[pipe] += os.read(self._pipes[pipe], 65536)
        line, _, self._rest[pipe] = self._rest[pipe].partition(b"\n")
        return line.decode()

    def fileno(self) -> int:
        """A descriptor that is readable when a batch has begun."""
        return self._pipes["started"]

    def started(self) -> list[str]:
        """Waits until the next batch has begun; returns the ids of its requests."""
        return self._line("started").split()[1:]

    def go(self, what: str = "k") -> None:
        """Lets one batch go on for each letter of `what`."""
        os.write(self._pipes["go"], what.encode())

    def forget(self) -> None:
        """Drops lines that were not read."""
        for pipe in self._rest:
            while select.select([self._pipes[pipe]], [], [], 0)[0]:
                os.read(self._pipes[pipe], 65536)
            self._rest[pipe] = b""

    def reported(self) -> list[str]:
        """Waits for the next finished batch; returns the ids of its requests that the model saw as cancelled."""
        return self._line("reported").split()

    def close(self) -> None:
        """Closes the test's ends."""
        for pipe in self._pipes.values():
            os.close(pipe)
