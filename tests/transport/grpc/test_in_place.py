"""Large messages are received where they lie, whatever frames they come in, and the connection survives all that ends them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.backends.python.models import python_model
from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity, request, response
from tests.support.raw_http2 import RawClient, frame, message
from tests.transport.conftest import SESSIONS

pytestmark = pytest.mark.skipif(
    "nghttp2" not in SESSIONS, reason="only the nghttp2 session tells how a frame goes on"
)

MIB = 1 << 20
PADDED = 8
END = 1
TENSOR = np.frombuffer(np.random.default_rng(5).bytes(MIB), np.uint8)
FIRST = 64 << 10  # what is received at once before it is known that a message is large
LEFT = 32 << 10  # of a message's end so much is received like anything else
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""


@pytest.fixture(scope="module")
def embedded(grpc_repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(grpc_repository, "nghttp2") as server:
        yield server


def in_place(server: EmbeddedServer) -> int:
    """Bytes that the open connections have received in place."""
    return server.ask(lambda: server.grpc_held().in_place_bytes)


def same(client: RawClient, stream_id: int, tensor: np.ndarray) -> bool:
    reply = client.finish(stream_id)
    assert reply.status == 0, reply.text
    return bool(response(*reply.messages).raw_output_contents[0] == tensor.tobytes())


def test_a_large_frame_is_received_in_place(server: EmbeddedServer) -> None:
    whole = message(request("big", TENSOR))
    with RawClient(server.grpc) as client:
        client.send(client.headers(1) + client.data(1, whole, size=MIB))
        assert same(client, 1, TENSOR)
        assert in_place(server) >= MIB - FIRST - LEFT
        before = in_place(server)
        assert client.call(3, identity()).status == 0
        assert in_place(server) == before


def test_triton_s_client_sends_such_frames_to_models_in_processes_of_their_own(tmp_path: Path) -> None:
    python_model(tmp_path, "echo", ECHO)
    tensor = TENSOR.view(np.float32)
    given = grpcclient.InferInput("IN", tensor.shape, "FP32")
    given.set_data_from_numpy(tensor)
    with (
        EmbeddedServer(tmp_path, "nghttp2") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        for _ in range(2):  # the first one may begin before the client knows how large frames may be
            before = in_place(server)
            found = client.infer("echo", [given]).as_numpy("OUT")
            assert found.tobytes() == tensor.tobytes()
        assert in_place(server) - before >= MIB // 2  # its frames are of 128 KiB and more


def test_small_and_padded_frames_are_not(server: EmbeddedServer) -> None:
    whole = message(request("big", TENSOR))
    with RawClient(server.grpc) as client:
        client.send(client.headers(1) + client.data(1, whole, size=8192))
        assert same(client, 1, TENSOR)
        parts = [whole[at : at + 400_000] for at in range(0, len(whole), 400_000)]
        client.send(client.headers(3))
        for i, part in enumerate(parts):
            flags = PADDED | (END if i == len(parts) - 1 else 0)
            client.send(frame(0, flags, 3, bytes([200]) + part + bytes(200)))
        assert same(client, 3, TENSOR)
        assert in_place(server) == 0


@pytest.mark.parametrize("seed", range(6))
def test_frames_of_any_size_of_several_calls_in_turn(server: EmbeddedServer, seed: int) -> None:
    chance = random.Random(seed)
    tensors = {id: np.roll(TENSOR, id)[: chance.randrange(300_000, MIB)] for id in (1, 3, 5)}
    with RawClient(server.grpc) as client:
        left = {id: message(request("big", tensor)) for id, tensor in tensors.items()}
        client.send(b"".join(client.headers(id) for id in left))
        out = b""
        while left:
            id = chance.choice(list(left))
            size = chance.choice([1, 5, 100, 9000, 16_384, 40_000, 65_536, 300_000, MIB])
            part, left[id] = left[id][:size], left[id][size:]
            pad = chance.choice([0, 0, 0, 7])
            flags = (PADDED if pad else 0) | (0 if left[id] else END)
            out += frame(0, flags, id, bytes([pad]) + part + bytes(pad) if pad else part)
            if not left[id]:
                del left[id]
        while out:  # and in pieces of any size
            size = chance.choice([1, 8, 9, 5000, 70_000, 200_000, MIB])
            client.send(out[:size])
            out = out[size:]
        assert all(same(client, id, tensor) for id, tensor in tensors.items())


def test_a_call_that_ends_in_the_middle_of_a_frame(server: EmbeddedServer) -> None:
    """Its deadline comes; the rest of its frame, which nobody reads, hurts no other call."""
    whole = message(request("big", TENSOR))
    with RawClient(server.grpc) as client:
        out = client.data(1, whole, size=MIB)
        client.send(client.headers(1, extra=[("grpc-timeout", "50m")]) + out[: 300 << 10])
        assert client.finish(1).status == 4
        client.send(out[300 << 10 :])
        assert client.call(3, identity()).status == 0
        client.send(client.headers(5) + client.data(5, whole, size=MIB))
        assert same(client, 5, TENSOR)


@pytest.mark.parametrize("part", [100_000, 500_000])
def test_a_client_that_leaves_in_the_middle_of_a_frame(server: EmbeddedServer, part: int) -> None:
    whole = message(request("big", TENSOR))
    with RawClient(server.grpc) as client:
        client.send(client.headers(1) + client.data(1, whole, size=MIB)[:part])
        server.until(lambda: server.grpc_held().unfinished_request_bytes > 0, "it is being received")
    server.until_idle()
    with RawClient(server.grpc) as client:
        assert client.call(1, identity()).status == 0


def test_what_follows_a_large_message_at_once(server: EmbeddedServer) -> None:
    whole = message(request("big", TENSOR))
    with RawClient(server.grpc) as client:
        out = client.headers(1) + client.data(1, whole, size=MIB)
        for id in range(3, 43, 2):
            out += client.headers(id) + client.data(id, message(identity(str(id))))
        client.send(out)
        assert same(client, 1, TENSOR)
        for id in range(3, 43, 2):
            assert response(*client.finish(id).messages).id == str(id)
