"""The budget of bytes (--max-held-bytes) over every road: requests that wait for a model, answers that nobody reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.certificates import Certificates
from tests.support.gate import Gate
from tests.support.http import Http1, Http2
from tests.support.infer_messages import binary_head
from tests.support.metrics import scrape, value
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

SIZE = 1_000_000  # bytes of a request that waits
LIMIT = 4_500_000
FITTING = 4
PATH = "/v2/models/gate/infer"
Outcome = str  # "" for an answer, else the error
FRONT_ENDS = "--frontends=1"

# road -> flags of its server beside those for TLS
ROADS: dict[str, tuple[str, ...]] = {
    "http1": (),
    "http1-tls": (),
    "http2": (),
    "http2-tls": (),
    "unary": (),
    "unary-tls": (),
    "stream": (),
    "stream-tls": (),
    "http1-front-end": (FRONT_ENDS,),
    "unary-front-end": (FRONT_ENDS,),
    "stream-front-end": (FRONT_ENDS,),
}


class Road:
    """One server and one way to it."""

    def __init__(self, name: str, repository: Path, folder: Path, *flags: str) -> None:
        self.name = name
        self.tls = name.endswith("-tls")
        certificates = Certificates(folder)
        if self.tls:
            certificate, key = certificates.issue("server")
            flags += (f"--http-tls-cert={certificate}", f"--http-tls-key={key}", "--grpc-use-ssl=1")
            flags += (f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}")
        self._roots = certificates.roots
        self._client = certificates.client
        self.server = ServerProcess(repository, *ROADS[name], *flags)
        self._open: list[Any] = []

    def http(self) -> Http1 | Http2:
        kind, alpn = (Http2, "h2") if "http2" in self.name else (Http1, "http/1.1")
        made = kind(self.server.http, self._client(alpn=alpn) if self.tls else None)
        self._open.append(made)
        return made

    def stub(self, *options: tuple[str, int]) -> service_pb2_grpc.GRPCInferenceServiceStub:
        options += (("grpc.use_local_subchannel_pool", 1),)
        if self.tls:
            credentials = grpc.ssl_channel_credentials(self._roots.read_bytes())
            address = self.server.grpc.replace("127.0.0.1", "localhost")
            channel = grpc.secure_channel(address, credentials, options)
        else:
            channel = grpc.insecure_channel(self.server.grpc, options)
        self._open.append(channel)
        return service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def ask(self, body: tuple[str, bytes], message: Any) -> Outcome:
        """One request on a connection of its own, over this road."""
        if "http" in self.name:
            head, tensors = body
            headers = {"Inference-Header-Content-Length": str(len(head))}
            with self.http() as client:
                reply = client.request("POST", PATH, head.encode() + tensors, headers)
            if reply.status != 200:
                assert (reply.status, "retry-after" in reply.headers) == (503, True)
                return str(json.loads(reply.body)["error"])
            return ""
        try:
            if "unary" in self.name:
                self.stub().ModelInfer(message, timeout=60)
                return ""
            # an error is the answer of its message, and the stream goes on
            stream = self.stub().ModelStreamInfer(iter([message]), timeout=60)
            return str(next(stream).error_message)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return str(error.details())

    def close(self) -> None:
        for each in self._open:
            each.close()
        self.server.stop()


def large() -> tuple[tuple[str, bytes], Any]:
    """A request of SIZE bytes to the gated model, for REST and for gRPC."""
    shape = [1, SIZE // 4]
    head = binary_head(shape, "INT32", SIZE).decode()
    message = service_pb2.ModelInferRequest(
        model_name="gate",
        inputs=[{"name": "INPUT0", "shape": shape, "datatype": "INT32"}],
        raw_input_contents=[bytes(SIZE)],
    )
    return (head, bytes(SIZE)), message


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "models", tmp_path / "pipes", size=1)
    yield made
    made.close()


def fill(gate: Gate, ask: Callable[[], Future[Outcome]], pending: Callable[[], int]) -> None:
    """Sends requests one after the other while the model sleeps: as many as fit wait, all others are refused."""
    waiting: list[Future[Outcome]] = []
    for _ in range(FITTING):
        sent = ask()
        waiting.append(sent)
        if len(waiting) == 1:
            gate.started()
        else:
            until(lambda: sent.done() or pending() == len(waiting) - 1, "the request waits")  # noqa: B023
            assert not sent.done(), sent.result()
    for _ in range(3):
        sent = ask()
        until(lambda: sent.done() or pending() == len(waiting), "the request is refused")  # noqa: B023
        assert sent.done(), "a request was let in for which there is no room"
        assert "--max-held-bytes" in sent.result()
    gate.go("k" * (FITTING + 1))
    assert [each.result() for each in waiting] == [""] * FITTING
    until(lambda: ask().result() == "", "there is room again")
    gate.forget()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROADS)
def test_requests_behind_a_model_that_sleeps(gate: Gate, tmp_path: Path, name: str) -> None:
    road = Road(name, tmp_path / "models", tmp_path, f"--max-held-bytes={LIMIT}")
    body, message = large()
    try:
        with ThreadPoolExecutor(FITTING + 1) as threads:

            def pending() -> int:
                return int(
                    value(
                        scrape(road.server), "nv_inference_pending_request_count", model="gate", version="1"
                    )
                )

            fill(gate, lambda: threads.submit(road.ask, body, message), pending)
    finally:
        gate.go("k" * 8)
        road.close()


ANSWER = 16_000_000  # more than the kernel takes for a connection
FILL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            size = int(pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy()[0])
            tensor = pb_utils.Tensor("OUT", np.zeros(size, np.uint8))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
FILL_CONFIG = (
    'backend: "python" input [ { name: "SIZE" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] } ] '
    'parameters { key: "isolation" value { string_value: "none" } }'
)


def wish(size: int) -> tuple[bytes, Any]:
    """A small request for an answer of that size, for REST and for gRPC."""
    asked = {"name": "SIZE", "shape": [1], "datatype": "INT32", "data": [size]}
    output = {"name": "OUT", "parameters": {"binary_data": True}}
    message = service_pb2.ModelInferRequest(
        model_name="fill",
        inputs=[{"name": "SIZE", "shape": [1], "datatype": "INT32"}],
        raw_input_contents=[size.to_bytes(4, "little")],
    )
    return json.dumps({"inputs": [asked], "outputs": [output]}).encode(), message


@pytest.mark.slow
@pytest.mark.parametrize("name", [road for road in ROADS if "http" in road])
def test_answers_that_nobody_reads(tmp_path: Path, name: str) -> None:
    """They fill the budget, which is said to others, until their clients are given up."""
    write_model(tmp_path / "models", "fill", FILL_CONFIG, {"1/model.py": FILL})
    road = Road(
        name, tmp_path / "models", tmp_path, f"--max-held-bytes={ANSWER}", "--http-request-timeout-secs=1"
    )
    body, _ = wish(ANSWER)
    small, _ = wish(1)

    def status() -> int:
        with road.http() as other:
            return other.request("POST", "/v2/models/fill/infer", small).status

    def refused() -> bool:
        """One more client that does not read; whether another is refused then."""
        road.http().start("POST", "/v2/models/fill/infer", body)
        return status() == 503

    try:
        assert status() == 200
        until(refused, "there is no room")
        until(lambda: status() == 200, "those who do not read are given up")
    finally:
        road.close()


@pytest.mark.slow
@pytest.mark.parametrize("header", ["identity", "identity;q=1"])  # past the parser, and through it
def test_answers_that_wait_for_an_earlier_one(gate: Gate, tmp_path: Path, header: str) -> None:
    """They fill the budget, too, as do answers that their clients do not read."""
    write_model(tmp_path / "models", "fill", FILL_CONFIG, {"1/model.py": FILL})
    road = Road("http1", tmp_path / "models", tmp_path, f"--max-held-bytes={LIMIT}")
    first = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}

    def status() -> int:
        with road.http() as other:
            return other.request("POST", "/v2/models/fill/infer", wish(1)[0]).status

    try:
        client = road.http()
        client.start("POST", PATH, json.dumps({"inputs": [first]}).encode())
        gate.started()
        assert status() == 200
        for _ in range(FITTING + 1):
            client.start("POST", "/v2/models/fill/infer", wish(SIZE)[0], {"Accept-Encoding": header})
        until(lambda: status() == 503, "there is no room")
        gate.go()
        assert [client.finish(0).status for _ in range(FITTING + 2)] == [200] * (FITTING + 2)
        until(lambda: status() == 200, "there is room again")
    finally:
        gate.go("k" * 8)
        road.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["http1", "http1-front-end"])
def test_heads_of_requests_that_wait(gate: Gate, tmp_path: Path, name: str) -> None:
    """On one connection, behind a request whose model sleeps: they count as long as those are not answered."""
    road = Road(name, tmp_path / "models", tmp_path, "--max-held-bytes=1000000")
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}]})
    large = {"X": "a" * 50_000}
    fitting = 19

    def status() -> int:
        with road.http() as other:
            return other.finish(other.start("GET", "/v2", b"", large)).status

    def pending() -> int:
        name = "nv_inference_pending_request_count"
        return int(value(scrape(road.server), name, model="gate", version="1"))

    try:
        client = road.http()
        client.start("POST", PATH, body.encode())
        gate.started()
        for _ in range(fitting + 1):
            client.start("POST", PATH, body.encode(), large)
        until(lambda: pending() == fitting, "as many as fit wait")
        assert status() == 503
        gate.go("k" * (fitting + 1))
        replies = [client.finish(0).status for _ in range(fitting + 2)]
        assert replies == [200] * (fitting + 1) + [503]
        until(lambda: status() == 200, "there is room again")
    finally:
        gate.go("k" * 8)
        road.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [road for road in ROADS if "stream" in road])
def test_answers_of_calls_that_nobody_reads(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "models", "fill", FILL_CONFIG, {"1/model.py": FILL})
    road = Road(name, tmp_path / "models", tmp_path, f"--max-held-bytes={ANSWER}")
    calls = []

    def refused() -> bool:
        try:
            road.stub().ModelInfer(wish(1)[1], timeout=60)
            return False
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "--max-held-bytes" in str(error.details())
            return True

    try:
        assert not refused()
        for _ in range(3):
            stub = road.stub(("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
            calls.append(
                stub.ModelStreamInfer(iter([wish(ANSWER)[1]] * 2), timeout=60)
            )  # nobody asks for more
        until(refused, "there is no room")
        for call in calls:
            call.cancel()
        until(lambda: not refused(), "there is room again")
    finally:
        road.close()
