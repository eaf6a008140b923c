"""What a further instance of a small model costs: forked from a template, it shares what that has imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, python_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

COUNT = 6
DOUBLE = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() * 2)])
            for request in requests
        ]
"""


@pytest.mark.slow
@no_memory_figures
def test_an_instance_of_a_small_model_has_under_12_mb_of_its_own(tmp_path: Path) -> None:
    python_model(tmp_path, "small", DOUBLE, config() + f" instance_group {{ count: {COUNT} kind: KIND_CPU }}")
    with ServerProcess(tmp_path) as server:
        with httpclient.InferenceServerClient(server.http, concurrency=COUNT) as client:
            tensor = httpclient.InferInput("IN", [4], "FP32")
            tensor.set_data_from_numpy(np.ones(4, np.float32))
            for answer in [client.async_infer("small", [tensor]) for _ in range(10 * COUNT)]:
                assert answer.get_result().as_numpy("OUT").tolist() == [2] * 4
        rows = stats(server, "small")["processes"]
        assert len({row["pid"] for row in rows}) == COUNT
        for row in rows:
            kinds = Path(f"/proc/{row['pid']}/smaps_rollup").read_text().splitlines()
            private = sum(int(kind.split()[1]) << 10 for kind in kinds if kind.startswith("Private_"))
            assert 0 < private < 12_000_000
            (written,) = (int(kind.split()[1]) << 10 for kind in kinds if kind.startswith("Private_Dirty:"))
            assert written < 4 << 20  # pages that are files' as they are are the system's


def messages(server: ServerProcess) -> int:
    """How many segments of shared memory the server has mapped for one message each."""
    return Path(f"/proc/{server.process.pid}/maps").read_text().count("neptrio-message")


@pytest.mark.slow
def test_the_server_keeps_no_large_message_that_was_answered(tmp_path: Path) -> None:
    python_model(tmp_path, "large", DOUBLE.replace("* 2", "[:1] * 2"), config())
    with (
        ServerProcess(tmp_path, f"--http-max-input-size={1 << 30}") as server,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
    ):
        count = 35 << 20  # more than there is room for in the memory for bodies, and for messages
        tensor = httpclient.InferInput("IN", [count], "FP32")
        tensor.set_data_from_numpy(np.ones(count, np.float32))
        assert client.infer("large", [tensor]).as_numpy("OUT").tolist() == [2]
        small = httpclient.InferInput("IN", [1], "FP32")
        small.set_data_from_numpy(np.ones(1, np.float32))

        def free() -> bool:
            """The process returns the message after its answer, which is seen with the next one."""
            assert client.infer("large", [small]).as_numpy("OUT").tolist() == [2]
            return messages(server) == 0

        until(free)
