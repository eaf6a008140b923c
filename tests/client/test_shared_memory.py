"""System shared memory through the real clients, and its refusals on both protocols."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

# its own in every process: several may run these tests at once
REGION = f"/neptrio_test_region_{os.getpid()}"

A = np.arange(32, dtype=np.int32).reshape(2, 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "identity", identity_config())
    write_model(repository, "text", identity_config("TYPE_STRING", "-1", 0, 1))
    with ServerProcess(repository, "--allow-client-shm=true") as process:
        yield process


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[tuple[Any, Any]]:
    module: Any = httpclient if request.param == "http" else grpcclient
    with module.InferenceServerClient(server.http if request.param == "http" else server.grpc) as made:
        yield module, made
        made.unregister_system_shared_memory()


@pytest.fixture
def region(request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = shm.create_shared_memory_region("region", REGION, 4096)
    yield handle
    shm.destroy_shared_memory_region(handle)


def test_tensors_in_shared_memory(client: tuple[Any, Any], region: Any) -> None:
    module, server = client
    shm.set_shared_memory_region(region, [A, A + 1])
    server.register_system_shared_memory("all", REGION, 4096)
    inputs, outputs = [], []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [2, 16], "INT32")
        tensor.set_shared_memory("all", 128, offset=128 * i)
        inputs.append(tensor)
        output = module.InferRequestedOutput(f"OUTPUT{i}")
        output.set_shared_memory("all", 128, offset=1024 + 128 * i)
        outputs.append(output)
    result = server.infer("identity", inputs, outputs=outputs)
    described = result.get_output("OUTPUT1")
    shape = described["shape"] if isinstance(described, dict) else list(described.shape)
    assert shape == [2, 16]
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.int32, [2, 16], 1024), A)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.int32, [2, 16], 1024 + 128), A + 1)


def test_strings_in_shared_memory(client: tuple[Any, Any], region: Any) -> None:
    module, server = client
    words = np.array([b"one", b"", b"drei"], dtype=object)
    packed = serialize_byte_tensor(words)
    size = len(packed.item())
    shm.set_shared_memory_region(region, [packed])
    server.register_system_shared_memory("all", REGION, 4096)
    tensor = module.InferInput("INPUT0", [3], "BYTES")
    tensor.set_shared_memory("all", size)
    assert server.infer("text", [tensor]).as_numpy("OUTPUT0").tolist() == words.tolist()


def test_status_and_unregister(client: tuple[Any, Any], region: Any) -> None:
    _module, server = client
    server.register_system_shared_memory("b", REGION, 256, offset=64)
    server.register_system_shared_memory("a", REGION, 64)
    status = server.get_system_shared_memory_status()
    if isinstance(status, list):
        assert status == [
            {"name": "a", "key": REGION, "offset": 0, "byte_size": 64},
            {"name": "b", "key": REGION, "offset": 64, "byte_size": 256},
        ]
    else:
        assert {n: (r.offset, r.byte_size) for n, r in status.regions.items()} == {
            "a": (0, 64),
            "b": (64, 256),
        }
    server.unregister_system_shared_memory("a")
    server.unregister_system_shared_memory("never")
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'a'"):
        server.get_system_shared_memory_status("a")


@pytest.mark.parametrize(
    ("name", "key", "size", "offset", "message"),
    [
        ("a", "/neptrio_nope", 64, 0, "Unable to open shared memory region: '/neptrio_nope'"),
        ("a", "/../etc/passwd", 64, 0, "Unable to open shared memory region"),
        ("a", "REGION", 4097, 0, "failed to register shared memory region 'a': invalid args"),
        ("a", "REGION", 64, 4090, "failed to register shared memory region 'a': invalid args"),
        ("a", "REGION", 0, 0, "failed to register shared memory region 'a': invalid args"),
        ("taken", "REGION", 64, 0, "shared memory region 'taken' already in manager"),
        ("a", "/triton_python_backend_shm_region_x", 64, 0, "reserved prefix"),
    ],
)
def test_registrations_that_are_refused(
    client: tuple[Any, Any], region: Any, name: str, key: str, size: int, offset: int, message: str
) -> None:
    _module, server = client
    server.register_system_shared_memory("taken", REGION, 64)
    with pytest.raises(InferenceServerException) as info:
        server.register_system_shared_memory(name, key.replace("REGION", REGION), size, offset=offset)
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("use", "size", "offset", "message"),
    [
        ("zzz", 128, 0, "Unable to find shared memory region: 'zzz'"),
        ("all", 128, 4097, "Invalid offset for shared memory region: 'all'"),
        ("all", 128, 4000, "Invalid offset + byte size for shared memory region: 'all'"),
        ("all", 0, 0, "Invalid offset + byte size for shared memory region: 'all'"),
        ("all", 64, 0, "input byte size mismatch for input 'INPUT0'"),
    ],
)
def test_inputs_that_do_not_fit(
    client: tuple[Any, Any], region: Any, use: str, size: int, offset: int, message: str
) -> None:
    module, server = client
    server.register_system_shared_memory("all", REGION, 4096)
    inputs = []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [2, 16], "INT32")
        tensor.set_shared_memory(use, size, offset=offset)
        inputs.append(tensor)
    with pytest.raises(InferenceServerException) as info:
        server.infer("identity", inputs)
    assert message in str(info.value)


def test_an_output_that_does_not_fit(client: tuple[Any, Any], region: Any) -> None:
    module, server = client
    server.register_system_shared_memory("all", REGION, 4096)
    inputs = []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [2, 16], "INT32")
        tensor.set_data_from_numpy(A)
        inputs.append(tensor)
    output = module.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory("all", 32)
    with pytest.raises(
        InferenceServerException, match=r"output 'OUTPUT0' \(32 bytes\) should be at least 128 bytes"
    ):
        server.infer("identity", inputs, outputs=[output])


def post(url: str, body: bytes) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def test_bodies_that_are_refused(server: ServerProcess) -> None:
    base = f"http://{server.http}/v2/systemsharedmemory"
    assert post(f"{base}/region/a/register", b"{}") == (
        400,
        "Shared memory register request has no 'key' field",
    )
    status, text = post(f"{base}/region/a/register", b'{"key": "/any"}')
    assert (status, text) == (400, "Shared memory register request has no 'byte_size' field")
    status, text = post(f"{base}/register", b'{"key": "/any", "byte_size": 4}')
    assert status == 400 and "'region name' is necessary" in text


def test_disabled_by_default(tmp_path: Any) -> None:
    write_model(tmp_path, "identity", identity_config())
    with ServerProcess(tmp_path) as server:
        for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
            with module.InferenceServerClient(address) as client:
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.register_system_shared_memory("a", "/x", 4)
                tensor = module.InferInput("INPUT0", [2, 16], "INT32")
                tensor.set_shared_memory("a", 128)
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.infer("identity", [tensor])
