"""System shared memory through the real clients, and its refusals on both protocols."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from neptrio.errors import Code, TritonError
from neptrio.service.system_shared_memory import SystemSharedMemory
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

# its own in every process: several may run these tests at once
REGION = f"/neptrio_test_region_{os.getpid()}"

ARGS = "failed to register shared memory region 'a': invalid args"
PART = "Invalid offset + byte size for shared memory region: 'all'"

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
        ("a", "REGION", 4097, 0, f"{ARGS} (its object has 4096 bytes, got offset 0 and byte_size 4097)"),
        ("a", "REGION", 64, 4090, f"{ARGS} (its object has 4096 bytes, got offset 4090 and byte_size 64)"),
        ("a", "REGION", 0, 0, f"{ARGS} (its object has 4096 bytes, got offset 0 and byte_size 0)"),
        ("taken", "REGION", 64, 0, "shared memory region 'taken' already in manager"),
        *(
            (
                name,
                f"{slashes}triton_python_backend_shm_region_x",
                64,
                0,
                f"cannot register shared memory region '{name}' with key '{slashes}triton_python_backend_shm_region_x' "
                "as the key contains the reserved prefix 'triton_python_backend_shm_region_'",
            )
            for name, slashes in (("a", ""), ("a", "/"), ("a", "//"), ("taken", "/"))
        ),
        *(
            ("a", key, 64, 0, f"region 'a' with key '{key}' as the key has no name")
            for key in ("", "/", "///")
        ),
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
    if "reserved prefix" in message or "has no name" in message:
        assert info.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("use", "size", "offset", "message"),
    [
        ("zzz", 128, 0, "Unable to find shared memory region: 'zzz'"),
        (
            "all",
            128,
            4097,
            "Invalid offset for shared memory region: 'all' (it has 4096 bytes, got offset 4097)",
        ),
        ("all", 128, 4000, f"{PART} (it has 4096 bytes, got offset 4000 and byte size 128)"),
        ("all", 0, 0, f"{PART} (it has 4096 bytes, got offset 0 and byte size 0)"),
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
        with error:
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


SHORTER = "shared memory region 'all' has become shorter: its object '{}' has {} bytes, the request's part ends at {};"


def file_of(region: str) -> str:
    return f"/dev/shm{region}"


def in_region(module: Any, cls: str, name: str, offset: int) -> Any:
    made = module.InferInput(name, [2, 16], "INT32") if cls == "input" else module.InferRequestedOutput(name)
    made.set_shared_memory("all", 128, offset=offset)
    return made


def given(module: Any, name: str) -> Any:
    made = module.InferInput(name, [2, 16], "INT32")
    made.set_data_from_numpy(A)
    return made


@pytest.mark.parametrize("left", [0, 64, 4095])
def test_an_object_that_its_owner_cuts_shorter(
    client: tuple[Any, Any], region: Any, server: ServerProcess, left: int
) -> None:
    """Neither reading nor writing what is gone ends the server; the request is told, and nobody else notices."""
    module, connection = client
    connection.register_system_shared_memory("all", REGION, 4096)
    os.truncate(file_of(REGION), left)
    with pytest.raises(InferenceServerException) as info:
        connection.infer("identity", [in_region(module, "input", f"INPUT{i}", 3968) for i in range(2)])
    assert SHORTER.format(REGION, left, 4096) in str(info.value)
    with pytest.raises(InferenceServerException) as info:
        inputs = [given(module, f"INPUT{i}") for i in range(2)]
        connection.infer("identity", inputs, outputs=[in_region(module, "output", "OUTPUT0", 3968)])
    assert SHORTER.format(REGION, left, 4096) in str(info.value)
    assert os.path.getsize(file_of(REGION)) == left, "the write has made it larger"
    np.testing.assert_array_equal(connection.infer("identity", inputs).as_numpy("OUTPUT0"), A)
    # it gets its size back: the region is what it was
    os.truncate(file_of(REGION), 4096)
    outputs = [in_region(module, "output", f"OUTPUT{i}", 3968 - 128 * i) for i in range(2)]
    connection.infer("identity", inputs, outputs=outputs)
    for i in range(2):
        np.testing.assert_array_equal(
            shm.get_contents_as_numpy(region, np.int32, [2, 16], 3968 - 128 * i), A, strict=True
        )
    assert server.process.poll() is None


@pytest.mark.slow
def test_an_object_whose_size_changes_all_the_time(
    client: tuple[Any, Any], region: Any, server: ServerProcess
) -> None:
    """Whenever it changes: every request is answered, with what was there or with an error."""
    module, connection = client
    connection.register_system_shared_memory("all", REGION, 4096)
    over = threading.Event()

    def change() -> None:
        fd = os.open(file_of(REGION), os.O_RDWR)
        try:
            while not over.is_set():
                os.ftruncate(fd, 0)
                os.ftruncate(fd, 4096)
        finally:
            os.close(fd)

    thread = threading.Thread(target=change)
    thread.start()
    errors = set()
    try:
        for _ in range(300):
            inputs = [in_region(module, "input", f"INPUT{i}", 128 * i) for i in range(2)]
            outputs = [in_region(module, "output", f"OUTPUT{i}", 1024 + 128 * i) for i in range(2)]
            try:
                connection.infer("identity", inputs, outputs=outputs)
            except InferenceServerException as error:
                errors.add(str(error).partition(" its object")[0].rpartition("shared memory")[2])
    finally:
        over.set()
        thread.join()
    assert errors <= {" region 'all' has become shorter:"}
    os.truncate(file_of(REGION), 4096)
    shm.set_shared_memory_region(region, [A, A])
    result = connection.infer(
        "identity", [in_region(module, "input", f"INPUT{i}", 128 * i) for i in range(2)]
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A)
    assert server.process.poll() is None


@pytest.mark.slow
def test_an_input_is_what_it_was_when_its_request_came(tmp_path: Path, region: Any) -> None:
    """A client that changes its region while the request waits changes nothing of the request."""
    repository = tmp_path / "models"
    gate = Gate(repository, tmp_path / "gate")
    shm.set_shared_memory_region(region, [A])
    try:
        with (
            EmbeddedServer(repository, allow_client_shm=True) as server,
            grpcclient.InferenceServerClient(server.grpc) as client,
            ThreadPoolExecutor() as pool,
        ):
            client.register_system_shared_memory("all", REGION, 4096)
            waits = pool.submit(client.infer, "gate", [given(grpcclient, "INPUT0")])
            gate.started()
            asked = pool.submit(client.infer, "gate", [in_region(grpcclient, "input", "INPUT0", 0)])
            server.until(lambda: server.inflight() == 2, "both requests have come")
            shm.set_shared_memory_region(region, [A + 7])
            client.unregister_system_shared_memory("all")
            gate.go("k")
            gate.go("k")
            np.testing.assert_array_equal(waits.result(60).as_numpy("OUTPUT0"), A)
            np.testing.assert_array_equal(asked.result(60).as_numpy("OUTPUT0"), A)
    finally:
        gate.close()


def test_descriptors_of_regions_are_bounded(tmp_path: Any, region: Any) -> None:
    """Half of them stay for connections, models and logs."""
    write_model(tmp_path, "identity", identity_config())
    with (
        ServerProcess(tmp_path, "--allow-client-shm=true") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))
        for i in range(64):
            client.register_system_shared_memory(f"r{i}", REGION, 64)
        with pytest.raises(
            InferenceServerException, match="64 regions are registered or used by requests, which is half"
        ):
            client.register_system_shared_memory("one more", REGION, 64)
        client.unregister_system_shared_memory("r0")
        client.register_system_shared_memory("one more", REGION, 64)


def test_inputs_of_all_requests_together_are_bounded(region: Any) -> None:
    regions = SystemSharedMemory(input_limit=200)
    regions.register("all", REGION, 0, 4096)
    first = regions.input_tensor("X", 8, (32,), "all", 0, 128)
    with pytest.raises(
        TritonError, match=r"no room for input 'Y' of 128 bytes: inputs .* take 128 bytes"
    ) as info:
        regions.input_tensor("Y", 8, (32,), "all", 0, 128)
    assert info.value.code is Code.RESOURCE_EXHAUSTED
    assert first.nbytes == 128
    del first
    assert regions.large.held == 0
    assert regions.input_tensor("Y", 8, (32,), "all", 0, 128).nbytes == 128


@pytest.mark.slow
def test_disabled_by_default(tmp_path: Any) -> None:
    write_model(tmp_path, "identity", identity_config())
    with ServerProcess(tmp_path) as server:
        for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
            with module.InferenceServerClient(address) as client:
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.register_system_shared_memory("a", "/x", 4)
                for status in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
                    if module is grpcclient:
                        assert not status().regions
                        continue
                    with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                        status()
                tensor = module.InferInput("INPUT0", [2, 16], "INT32")
                tensor.set_shared_memory("a", 128)
                with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                    client.infer("identity", [tensor])


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="the system has no leases")
def test_a_lease_on_the_object_holds_nobody_up(server: ServerProcess) -> None:
    """open() would wait until its holder gives the lease up, 45 seconds and more, and with it the whole server."""
    before = signal.signal(signal.SIGIO, lambda *_: None)  # how the holder is asked to do so
    fd = os.open(f"/dev/shm{REGION}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with httpclient.InferenceServerClient(server.http) as client:
            with pytest.raises(InferenceServerException, match="another process holds a lease on it"):
                client.register_system_shared_memory("leased", REGION, 4096)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            client.register_system_shared_memory("leased", REGION, 4096)
            client.unregister_system_shared_memory("leased")
    finally:
        os.close(fd)
        os.unlink(f"/dev/shm{REGION}")
        signal.signal(signal.SIGIO, before)
