"""Batches that cannot be sent to their model's process: they fail, alone, and their places are free again."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import neptrio
from neptrio.backends.python import process_session
from tests.backends.python.models import isolated
from tests.support.server import ServerProcess
from tests.support.waiting import until

SUM = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy().sum(keepdims=True))])
                for r in requests]
"""
CALLING = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            called = pb_utils.InferenceRequest(
                model_name="sum", inputs=request.inputs(), requested_output_names=["OUT"], correlation_id=-1).exec()
            answers.append(pb_utils.InferenceResponse(error=called.error()) if called.has_error() else called)
        return answers
"""


def ask(client: httpclient.InferenceServerClient, model: str, array: np.ndarray) -> float:
    tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return float(client.infer(model, [tensor]).as_numpy("OUT")[0])


@pytest.mark.slow
def test_without_descriptors_a_large_request_fails_and_the_next_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_session, "AREA_BYTES", 1 << 20)  # what is larger takes a descriptor
    isolated(tmp_path, "sum", SUM)
    one, large = np.ones(1, np.float32), np.ones(1 << 19, np.float32)
    with neptrio.Server(tmp_path).running() as server:
        model = server.model("sum")
        assert model.infer({"IN": large})["OUT"][0] == 1 << 19

        def free() -> bool:
            """Its descriptor is: the process returns the message after its answer, which is seen with the next one."""
            assert model.infer({"IN": one})["OUT"][0] == 1
            return "neptrio-message" not in Path("/proc/self/maps").read_text()

        until(free)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open(os.devnull) as lowest:  # every lower number is taken
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 1, before[1]))
            try:
                for _ in range(3):
                    with pytest.raises(neptrio.TritonError, match="Too many open files"):
                        model.infer({"IN": large})
                    assert model.infer({"IN": one})["OUT"][0] == 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert model.infer({"IN": large})["OUT"][0] == 1 << 19


@pytest.mark.parametrize("id", [-1, 1 << 64, 0.5])
def test_ids_of_sequences_are_checked_before_a_request_is_accepted(tmp_path: Path, id: object) -> None:
    isolated(tmp_path, "sum", SUM)
    with neptrio.Server(tmp_path).running() as server:
        model = server.model("sum")
        with pytest.raises(neptrio.InvalidArgument, match="sequence id"):
            model.infer({"IN": np.ones(1, np.float32)}, sequence_id=id)  # type: ignore[arg-type]
        assert model.infer({"IN": np.ones(2, np.float32)}, sequence_id=np.uint64(7))["OUT"][0] == 2


@pytest.mark.slow
def test_a_model_that_calls_with_an_impossible_id_is_told(tmp_path: Path) -> None:
    isolated(tmp_path, "sum", SUM)
    isolated(tmp_path, "calling", CALLING, way="none")
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(
            InferenceServerException, match=r"sequence id must be from 0 to 18446744073709551615 .* got -1"
        ):
            ask(client, "calling", np.ones(1, np.float32))
        assert ask(client, "sum", np.ones(3, np.float32)) == 3
