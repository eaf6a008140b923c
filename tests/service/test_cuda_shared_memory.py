"""The CUDA shared memory extension: its verbs on both protocols, and regions without a GPU.

What needs device memory is in tests/backends/kernel/test_gpu.py.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.errors import AlreadyExists, Internal, InvalidArgument, NotFound
from neptrio.service.cuda_shared_memory import CudaSharedMemory
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until_trio

HANDLE = bytes(64)


@dataclass
class FakeRegion:
    """A region at an address that is never touched."""

    name: str
    raw_handle: bytes
    device_id: int
    byte_size: int
    address: int = 4096


def test_regions() -> None:
    memory = CudaSharedMemory(FakeRegion)
    trio.run(memory.register, "b", HANDLE, 0, 100)
    trio.run(memory.register, "a", HANDLE, 1, 200)
    assert memory.status() == [
        {"name": "a", "device_id": 1, "byte_size": 200},
        {"name": "b", "device_id": 0, "byte_size": 100},
    ]
    assert memory.status("b") == [{"name": "b", "device_id": 0, "byte_size": 100}]
    assert memory.statistics().regions == 2 and memory.statistics().bytes == 300
    with pytest.raises(AlreadyExists, match="shared memory region 'a' already in manager"):
        trio.run(memory.register, "a", HANDLE, 0, 100)
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'c'"):
        memory.status("c")
    memory.unregister("nobody")
    memory.unregister("a")
    assert not memory.has("a") and memory.has("b")
    memory.unregister()
    assert memory.status() == []


def test_a_driver_that_hangs_holds_up_nobody() -> None:
    opening, opened = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> FakeRegion:
        opening.set()
        assert opened.wait(120)
        return FakeRegion(*arguments)

    async def give_up(memory: CudaSharedMemory) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(memory.register, "r", HANDLE, 0, 100)
            await until_trio(opening.is_set)
            nursery.cancel_scope.cancel()

    memory = CudaSharedMemory(hang)
    given_up = threading.Thread(target=trio.run, args=(give_up, memory), daemon=True)
    given_up.start()
    try:
        given_up.join(60)
        assert not given_up.is_alive()
    finally:
        opened.set()
    assert not memory.has("r")


def test_inputs_and_outputs_stay_inside_their_region() -> None:
    memory = CudaSharedMemory(FakeRegion)
    trio.run(memory.register, "r", HANDLE, 1, 100)
    tensor = memory.input_tensor("X", 11, (4,), "r", 84, 16)
    assert (tensor.address, tensor.nbytes, tensor.memory_kind, tensor.memory_id) == (4096 + 84, 16, 2, 1)
    memory.unregister("r")  # the tensor keeps the region
    assert isinstance(tensor.owner, FakeRegion)
    trio.run(memory.register, "r", HANDLE, 1, 100)
    region = memory.named("r")
    assert memory.output_place(region, 50, 50, 50, "Y")[0] == 4096 + 50
    assert not memory.has("other")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'zzz'"):
        memory.input_tensor("X", 11, (4,), "zzz", 0, 16)
    with pytest.raises(InvalidArgument, match="Invalid offset for shared memory region: 'r'"):
        memory.input_tensor("X", 11, (4,), "r", 101, 16)
    for offset, size in ((90, 16), (0, 0), (0, 101)):
        with pytest.raises(
            InvalidArgument, match=r"Invalid offset \+ byte size for shared memory region: 'r'"
        ):
            memory.input_tensor("X", 11, (4,), "r", offset, size)
    with pytest.raises(InvalidArgument, match="BYTES tensors can't be in a CUDA shared memory region"):
        memory.input_tensor("X", 13, (1,), "r", 0, 16)
    with pytest.raises(Internal, match=r"output 'Y' \(8 bytes\) should be at least 16 bytes"):
        memory.output_place(region, 0, 8, 16, "Y")


@pytest.mark.parametrize(
    ("name", "handle", "size", "message"),
    [
        ("", HANDLE, 10, "'region name' is necessary"),
        ("r", bytes(10), 10, r"failed to register shared memory region: invalid args .*64 bytes, got 10"),
        ("r", HANDLE, 0, r"failed to register shared memory region: invalid args .*above 0, got 0"),
    ],
)
def test_bad_registrations(name: str, handle: bytes, size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        trio.run(CudaSharedMemory(FakeRegion).register, name, handle, 0, size)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "identity", identity_config())
    with ServerProcess(repository, "--allow-client-shm=true") as process:
        yield process


def call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    finally:
        connection.close()


def test_verbs_over_http(server: ServerProcess) -> None:
    assert call(server, "GET", "/v2/cudasharedmemory/status") == (200, [])
    assert call(server, "GET", "/v2/cudasharedmemory/region/r/status")[0] == 404
    assert call(server, "POST", "/v2/cudasharedmemory/region/r/unregister") == (200, None)
    assert call(server, "POST", "/v2/cudasharedmemory/unregister") == (200, None)
    assert call(server, "POST", "/v2/cudasharedmemory/status")[0] == 405
    register = "/v2/cudasharedmemory/region/r/register"
    handle = {"b64": base64.b64encode(HANDLE).decode()}
    for body, message in (
        ({}, "Shared memory register request has no 'raw_handle' field"),
        ({"raw_handle": {"b64": "%"}}, "must be base64"),
        ({"raw_handle": handle}, "Shared memory register request has no 'device_id' field"),
        ({"raw_handle": handle, "device_id": 0}, "Shared memory register request has no 'byte_size' field"),
        (
            {"raw_handle": handle, "device_id": 0, "byte_size": "x"},
            'must be an integer from 0 to 9223372036854775807, got "x"',
        ),
        ([], "must be a JSON object"),
        (
            {"raw_handle": handle, "device_id": 99, "byte_size": 8},
            "failed to register shared memory region: invalid args",
        ),
    ):
        status, answer = call(server, "POST", register, body)
        assert status == 400 and message in answer["error"], body


@pytest.mark.slow
def test_verbs_with_the_clients(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_cuda_shared_memory_status() == []
        client.unregister_cuda_shared_memory()
        with pytest.raises(
            InferenceServerException, match="failed to register shared memory region: invalid args"
        ):
            client.register_cuda_shared_memory("r", base64.b64encode(HANDLE), 99, 8)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert not client.get_cuda_shared_memory_status().regions
        client.unregister_cuda_shared_memory("r")
        with pytest.raises(
            InferenceServerException, match="failed to register shared memory region: invalid args"
        ) as info:
            client.register_cuda_shared_memory("r", HANDLE, 99, 8)
        assert info.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException) as info:
            client.get_cuda_shared_memory_status("r")
        assert info.value.status() == "StatusCode.NOT_FOUND"


def shared_inputs(module: Any) -> list[Any]:
    made = []
    for i in range(2):
        made.append(module.InferInput(f"INPUT{i}", [1, 16], "INT32"))
        made[-1].set_shared_memory("zzz", 64)
    return made


def test_an_unknown_region_in_a_request(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'zzz'"):
            client.infer("identity", shared_inputs(httpclient))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(
            InferenceServerException, match="Unable to find shared memory region: 'zzz'"
        ) as info:
            client.infer("identity", shared_inputs(grpcclient))
        assert info.value.status() == "StatusCode.NOT_FOUND"


def test_off_by_default(tmp_path: Path) -> None:
    write_model(tmp_path, "identity", identity_config())
    with ServerProcess(tmp_path) as server:
        status, answer = call(server, "GET", "/v2/cudasharedmemory/status")
        assert status == 501 and "--allow-client-shm=true" in answer["error"]
        with httpclient.InferenceServerClient(server.http) as client:
            with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                client.infer("identity", shared_inputs(httpclient))
            assert client.infer("identity", identity_inputs(httpclient)).as_numpy("OUTPUT0").shape == (1, 16)
