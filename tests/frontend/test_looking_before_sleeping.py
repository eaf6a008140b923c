"""Loops that look for requests, engine and front ends that look for each other's messages, before they sleep: nothing is
lost between look and sleep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

REQUESTS = 400


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("microseconds", [0, 20, 1000])
@pytest.mark.parametrize("frontends", [0, 1])
def test_every_request_is_answered(tmp_path: Path, clients: int, microseconds: int, frontends: int) -> None:
    write_model(tmp_path, "identity", identity_config(dims="-1", pairs=1))

    def client(number: int, address: str) -> list[int]:
        got = []
        with grpcclient.InferenceServerClient(address) as client:
            for i in range(REQUESTS):
                tensor = grpcclient.InferInput("INPUT0", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.array([[1000 * number + i]], np.int32))
                answer = client.infer("identity", [tensor], client_timeout=60)
                got.append(int(answer.as_numpy("OUTPUT0").item()))
        return got

    flags = (f"--frontends={frontends}", f"--busy-poll-us={microseconds}")
    with ServerProcess(tmp_path, *flags) as server, ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number, server.grpc) for number in range(clients)]
        for number, each in enumerate(running):
            assert each.result(120) == [1000 * number + i for i in range(REQUESTS)]
