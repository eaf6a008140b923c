"""Regions that are unregistered, or whose names get another object, while requests use them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.support.gate import Gate
from tests.support.server import ServerProcess

SIZE = 4 << 20
OURS, OTHER = (f"/neptrio_test_{name}_{os.getpid()}" for name in ("ours", "other"))


@pytest.fixture
def objects() -> Iterator[tuple[Any, Any]]:
    made = tuple(shm.create_shared_memory_region("r", key, SIZE) for key in (OURS, OTHER))
    yield made
    for handle in made:
        shm.destroy_shared_memory_region(handle)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "models", tmp_path / "gate")
    yield made
    made.close()


def ask(module: Any, server: ServerProcess, values: np.ndarray) -> None:
    """Sends `values`, which come back into region `r`."""
    tensor = module.InferInput("INPUT0", list(values.shape), "INT32")
    tensor.set_data_from_numpy(values)
    output = module.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory("r", values.nbytes)
    with module.InferenceServerClient(address(module, server)) as client:
        client.infer("gate", [tensor], outputs=[output])


def address(module: Any, server: ServerProcess) -> str:
    return server.http if module is httpclient else server.grpc


@pytest.mark.slow
@pytest.mark.parametrize("module", [httpclient, grpcclient])
@pytest.mark.parametrize("front_ends", [0, 1])
def test_an_output_goes_where_its_request_said(
    tmp_path: Path, objects: tuple[Any, Any], gate: Gate, module: Any, front_ends: int
) -> None:
    """Small ones are written at once, large ones by a worker."""
    flags = ("--allow-client-shm=true", f"--frontends={front_ends}")
    with ServerProcess(tmp_path / "models", *flags) as server, ThreadPoolExecutor() as pool:
        with module.InferenceServerClient(address(module, server)) as client:
            for count in (4, SIZE // 8):
                values = np.arange(1, count + 1, dtype=np.int32).reshape(1, count)
                for handle in objects:
                    shm.set_shared_memory_region(handle, [np.zeros_like(values)])
                client.register_system_shared_memory("r", OURS, SIZE)
                waits = pool.submit(ask, module, server, values)
                gate.started()
                client.unregister_system_shared_memory("r")
                client.register_system_shared_memory("r", OTHER, SIZE)
                gate.go("k")
                waits.result(60)
                ours, other = (shm.get_contents_as_numpy(each, np.int32, values.shape) for each in objects)
                np.testing.assert_array_equal(ours, values)
                assert not other.any(), "the output is in the object of another registration"
                client.unregister_system_shared_memory("r")


@pytest.mark.slow
@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_a_name_that_is_unknown_when_the_request_comes(tmp_path: Path, gate: Gate, module: Any) -> None:
    """It is refused before the model executes anything."""
    gate.go("k")
    with ServerProcess(tmp_path / "models", "--allow-client-shm=true") as server:
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
            ask(module, server, np.zeros((1, 4), np.int32))
        with grpcclient.InferenceServerClient(server.grpc) as client:
            (statistics,) = client.get_inference_statistics("gate").model_stats
            assert statistics.execution_count == 0


@pytest.mark.slow
def test_regions_that_only_requests_use_count(tmp_path: Path, objects: tuple[Any, Any], gate: Gate) -> None:
    """Unregistering gives a descriptor back when the last request is answered, so no more are taken before."""
    values = np.ones((1, 4), np.int32)
    with (
        ServerProcess(tmp_path / "models", "--allow-client-shm=true") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        ThreadPoolExecutor() as pool,
    ):
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))
        client.register_system_shared_memory("r", OURS, SIZE)
        waits = pool.submit(ask, grpcclient, server, values)
        gate.started()
        client.unregister_system_shared_memory("r")
        for i in range(63):
            client.register_system_shared_memory(f"r{i}", OTHER, SIZE)
        try:
            with pytest.raises(
                InferenceServerException, match="64 regions are registered or used by requests"
            ):
                client.register_system_shared_memory("one more", OTHER, SIZE)
        finally:
            gate.go("k")
        waits.result(60)
        client.register_system_shared_memory("one more", OTHER, SIZE)
