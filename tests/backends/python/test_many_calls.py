"""A model that makes thousands of calls in each request leaves nothing of them behind, neither with itself nor in the server.

Blocks of Python's allocator are counted in the model's process, behind a complete collection: a block that stays per call would
be thousands.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.backends.python.models import config, isolated
from tests.support.http import Http1
from tests.support.server import ServerProcess

CALLS = 3000
# blocks more or less: what is cached, what others do in the same process, and answers on their way, which differ by a few
# hundred from one request to the next and do not grow; one block of each call would be CALLS
FEW = CALLS // 3
MODEL = f"""
import asyncio, gc, sys
import numpy as np

ONE = np.ones(4, np.float32)

def request(target):
    return pb_utils.InferenceRequest(
        model_name=target, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", ONE)], request_id="inner")

class TritonPythonModel:
    def execute(self, requests):
        for _ in requests:
            if HOW == "exec":
                for _ in range({CALLS}):
                    assert not request("echo").exec().has_error()
            elif HOW == "decoupled":
                for _ in range({CALLS}):
                    for response in request("twice").exec(decoupled=True):
                        assert not response.has_error()
            elif HOW == "refused":
                for _ in range({CALLS}):
                    assert request("nobody").exec().has_error()
            else:
                async def all():
                    for _ in range({CALLS} // 100):
                        for response in await asyncio.gather(*[request("echo").async_exec() for _ in range(100)]):
                            assert not response.has_error()
                asyncio.run(all())
        gc.collect()
        blocks = np.array([sys.getallocatedblocks()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("BLOCKS", blocks)]) for _ in requests]
"""
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
TWICE = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = config(extra="model_transaction_policy { decoupled: true }")
HOWS = ("exec", "async", "decoupled", "refused")


@pytest.mark.parametrize("way", ["process", "none", sys.prefix], ids=["process", "none", "interpreter"])
@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_left_of_a_call(tmp_path: Path, way: str, how: str) -> None:
    isolated(tmp_path, "calls", f"HOW = {how!r}\n{MODEL}", config(outputs="BLOCKS:TYPE_INT64:1"), way=way)
    isolated(tmp_path, "echo", ECHO)
    isolated(tmp_path, "twice", TWICE, DECOUPLED)
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
    with ServerProcess(tmp_path) as server, Http1(server.http) as http:
        found = []
        for _ in range(3):
            reply = http.request("POST", "/v2/models/calls/infer", body)
            assert reply.status == 200, reply.body
            found += json.loads(reply.body)["outputs"][0]["data"]
    _, before, after = found  # the first one imports and fills caches
    assert abs(after - before) < FEW, found
