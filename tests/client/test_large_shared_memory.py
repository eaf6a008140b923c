"""Large inputs in shared memory are read by workers: others are served meanwhile, and the order stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from neptrio.codec.proto_request import decodes_slowly
from neptrio.codec.shared_memory import names_large_inputs
from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.large_region import COUNT, LARGE, REGION, VALUES, large_region
from tests.support.repository import identity_config, write_model
from tests.support.streams import Answers


@pytest.fixture
def region() -> Iterator[None]:
    with large_region():
        yield


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    return gate_workers(monkeypatch)


@pytest.fixture
def server(tmp_path: Path, gate: WorkersGate, region: None) -> Iterator[EmbeddedServer]:
    write_model(tmp_path, "identity", identity_config(dims="-1", max_batch_size=0, pairs=1))
    write_model(tmp_path, "four", identity_config(dims="-1", max_batch_size=0, pairs=4))
    with EmbeddedServer(tmp_path, allow_client_shm=True) as made:
        yield made
        made.ask(gate.open.set)


def asked(module: Any, count: int) -> list[Any]:
    made = module.InferInput("INPUT0", [count], "INT32")
    made.set_shared_memory("all", 4 * count)
    return [made]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_loop_goes_on_while_a_worker_reads(
    server: EmbeddedServer, gate: WorkersGate, protocol: str
) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    address = server.http if protocol == "http" else server.grpc

    def infer(count: int) -> Any:
        with module.InferenceServerClient(address) as client:
            return client.infer("identity", asked(module, count)).as_numpy("OUTPUT0")

    with module.InferenceServerClient(address) as client, ThreadPoolExecutor() as pool:
        client.register_system_shared_memory("all", REGION, 2 * LARGE)
        large = pool.submit(infer, COUNT)
        server.until(lambda: gate.asked == 1, "a worker was asked to read")
        np.testing.assert_array_equal(infer(16), VALUES[:16])
        assert gate.asked == 1  # the loop has read the small input itself
        server.ask(gate.open.set)
        np.testing.assert_array_equal(large.result(60), VALUES)


def test_messages_of_a_stream_stay_in_order(server: EmbeddedServer, gate: WorkersGate) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.register_system_shared_memory("all", REGION, 2 * LARGE)
        client.async_stream_infer("identity", asked(grpcclient, COUNT), request_id="large")
        client.async_stream_infer("identity", asked(grpcclient, 16), request_id="small")
        server.until(lambda: gate.asked == 1, "a worker was asked to read")
        server.ask(gate.open.set)
        assert [result.get_response().id for result in answers.results(2)] == ["large", "small"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_region_that_ends_earlier_is_the_requests_error(
    server: EmbeddedServer, gate: WorkersGate, region: None, protocol: str
) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    server.ask(gate.open.set)
    with module.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        client.register_system_shared_memory("all", REGION, 2 * LARGE)
        os.truncate(f"/dev/shm{REGION}", LARGE - 1)
        with pytest.raises(InferenceServerException, match="has become shorter"):
            client.infer("identity", asked(module, COUNT))
        assert gate.asked == 1
        np.testing.assert_array_equal(
            client.infer("identity", asked(module, 16)).as_numpy("OUTPUT0"), VALUES[:16]
        )


def test_a_request_too_short_to_name_much_is_not_searched(server: EmbeddedServer, gate: WorkersGate) -> None:
    """What it says of a small region is refused by the loop."""
    with httpclient.InferenceServerClient(server.http) as client:
        client.register_system_shared_memory("all", REGION, 4096)
        with pytest.raises(InferenceServerException, match="Invalid offset"):
            client.infer("identity", asked(httpclient, COUNT))
        assert gate.asked == 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_small_parts_of_a_small_region_that_are_large_together(
    server: EmbeddedServer, gate: WorkersGate, protocol: str
) -> None:
    """The region has no more than the loop reads at once, and the request, which is short, names it again and again."""
    module: Any = httpclient if protocol == "http" else grpcclient
    server.ask(gate.open.set)
    with module.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        client.register_system_shared_memory("all", REGION, LARGE // 32)
        for count, steps in ((32, 1), (8, 1)):  # of these the first are large together, the others not
            made = [module.InferInput(f"INPUT{i}", [COUNT // 32], "INT32") for i in range(count)]
            for tensor in made:
                tensor.set_shared_memory("all", LARGE // 32)
            with pytest.raises(InferenceServerException, match=f"expected 1 inputs but got {count}"):
                client.infer("identity", made)
            assert gate.asked == steps


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_outputs_that_are_large_together(server: EmbeddedServer, gate: WorkersGate, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    server.ask(gate.open.set)
    with module.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        client.register_system_shared_memory("all", REGION, 2 * LARGE)
        inputs, outputs = [], []
        for i in range(4):
            inputs.append(module.InferInput(f"INPUT{i}", [COUNT // 4], "INT32"))
            inputs[-1].set_data_from_numpy(VALUES[: COUNT // 4])
            outputs.append(module.InferRequestedOutput(f"OUTPUT{i}"))
            outputs[-1].set_shared_memory("all", LARGE // 4, i * LARGE // 4)
        client.infer("four", inputs, outputs=outputs[:2])
        assert gate.asked == 0, "the loop copies a MiB itself"
        client.infer("four", inputs, outputs=outputs)
        assert gate.asked == 1


@pytest.mark.parametrize(
    ("text", "large"),
    [
        (b'{"inputs":[{"parameters":{"shared_memory_byte_size":1048576}}]}', False),
        (b'{"inputs":[{"parameters":{"shared_memory_byte_size" : 1048577}}]}', True),
        (
            b'{"inputs":[{"p":{"shared_memory_byte_size":700000}},{"p":{"shared_memory_byte_size":700000}}]}',
            True,
        ),
        (b'{"inputs":[],"outputs":[{"parameters":{"shared_memory_byte_size":9999999}}]}', False),
        (b'{"outputs":[],"inputs":[{"parameters":{"shared_memory_byte_size":9999999}}]}', True),
        (b'{"inputs":[{"name":"outputs","parameters":{"shared_memory_byte_size":9999999}}]}', True),
        (b'{"inputs":[{"parameters":{"shared\\u005fmemory_byte_size":9999999}}]}', True),
    ],
)
def test_large_inputs_are_found_in_json(text: bytes, large: bool) -> None:
    assert names_large_inputs(text) is large


def test_large_inputs_are_found_in_messages() -> None:
    def message(*sizes: int, **more: int) -> bytes:
        made = service_pb2.ModelInferRequest(model_name="m")
        for size in sizes:
            made.inputs.add(name="X").parameters["shared_memory_byte_size"].int64_param = size
        for name, size in more.items():
            made.outputs.add(name=name).parameters["shared_memory_byte_size"].int64_param = size
        return made.SerializeToString()

    assert not decodes_slowly(message(1 << 20))
    assert decodes_slowly(message((1 << 20) + 1))
    assert decodes_slowly(message(700_000, 700_000))
    assert decodes_slowly(message(1 << 40))
    assert not decodes_slowly(message(16, Y=1 << 30))
    # a map's entry may have its value before its key
    plain = message(5)
    entry = bytes([10, 23]) + b"shared_memory_byte_size" + bytes([18, 2, 16, 5])
    assert entry in plain
    assert decodes_slowly(plain.replace(entry, bytes([18, 2, 16, 5, 10, 23]) + b"shared_memory_byte_size"))
    assert not decodes_slowly(plain[:-3])  # cut off: decoding it says so
