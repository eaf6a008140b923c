"""Lines of a Triton server's log that people's scripts wait for."""

from __future__ import annotations

import queue
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.control import infer, settled
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

SAMPLE = """model_warmup [ { name: "regular sample" batch_size: 1
    inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: [ 16 ] zero_data: true } }
    inputs { key: "INPUT1" value { data_type: TYPE_INT32 dims: [ 16 ] zero_data: true } } } ]"""


def test_loads_unloads_and_samples_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config(extra=SAMPLE), versions=(1, 2))
    write_model(tmp_path, "other", identity_config())
    flags = ("--model-control-mode=explicit", "--load-model=m", "--log-verbose=1")
    with ServerProcess(tmp_path, *flags) as server:
        assert server.log().count("] successfully loaded 'm' version ") == 1
        assert re.search(r"model 'm' instance \S+ is running warmup sample 'regular sample'\n", server.log())
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("other")
            server.until_logged("] successfully loaded 'other' version ")
            client.unload_model("m")
            server.until_logged("] successfully unloaded 'm' version 2\n")
            settled(client, "m")
            infer(client, "other")
        with grpcclient.InferenceServerClient(server.grpc) as client:
            client.unload_model("other")
            server.until_logged("] successfully unloaded 'other' version 1\n")


def test_requests_under_way_at_the_shutdown(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "repository", tmp_path / "gate")
    with (
        ServerProcess(tmp_path / "repository") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        answers: queue.Queue[Any] = queue.Queue()
        tensor = grpcclient.InferInput("INPUT0", [1, 4], "INT32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.int32))
        client.async_infer("gate", [tensor], lambda result, error: answers.put((result, error)))
        gate.started()
        server.process.send_signal(signal.SIGTERM)
        server.until_logged("] Timeout 30: Found 1 model versions that have in-flight inferences\n")
        server.until_logged("] Model 'gate' (version 1) has 1 in-flight inferences\n")
        gate.go()
        assert answers.get(timeout=60)[1] is None
        assert server.ended() == 0
        server.until_logged("successfully unloaded 'gate' version 1")
    gate.close()
