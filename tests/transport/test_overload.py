"""Limits of a client address and of all held bytes: clear answers, and probes that are answered meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.gate import Gate
from tests.support.http import Http1, Http2, Reply
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess, without_front_ends
from tests.support.streams import Answers
from tests.support.waiting import until
from tests.transport.test_tokens import BODY, INFER, KINDS


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity_config())
    return folder


def start(repository: Path, kind: str, *flags: str) -> ServerProcess:
    return ServerProcess(repository, *(["--http-lean=false"] if kind == "hypercorn" else []), *flags)


def client(server: ServerProcess, kind: str) -> Http1 | Http2:
    return (Http2 if kind == "http2" else Http1)(server.http)


def told_to_wait(reply: Reply, status: int, flag: str) -> None:
    assert reply.status == status
    assert flag in json.loads(reply.body)["error"]
    assert int(reply.headers["retry-after"]) > 0


def probes_are_answered(server: ServerProcess, kind: str) -> None:
    with client(server, kind) as other, grpc.insecure_channel(server.grpc) as channel:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready"):
            assert other.request("GET", path).status == 200
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    with Http1(server.metrics) as metrics:
        assert metrics.request("GET", "/metrics").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_in_a_second_than_an_address_may_make(repository: Path, kind: str) -> None:
    with start(repository, kind, "--max-requests-per-second-per-address=1") as server:
        with client(server, kind) as one, client(server, kind) as two:
            # whenever a second begins, of many in a row most are too many
            replies = [(one, two)[i % 2].request("POST", INFER, BODY) for i in range(50)]
            statuses = [reply.status for reply in replies]
            assert statuses[0] == 200
            assert set(statuses) == {200, 429}
            told_to_wait(next(r for r in replies if r.status == 429), 429, "per-second")
        probes_are_answered(server, kind)
        triton = triton_grpc.InferenceServerClient(server.grpc)
        outcomes = []
        for _ in range(50):
            try:
                triton.infer("simple", identity_inputs())
                outcomes.append("")
            except InferenceServerException as error:
                outcomes.append(str(error.status()))
                assert "per-second" in str(error)
        assert "StatusCode.RESOURCE_EXHAUSTED" in outcomes
        triton.close()


def test_messages_of_a_stream_count_as_requests(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "access"  # whose lines are made of messages that are refused before they are read, too
    with start(
        repository, "lean", "--max-requests-per-second-per-address=2",
        "--access-log=json", f"--access-log-file={log}",
    ) as server:  # fmt: skip
        triton = triton_grpc.InferenceServerClient(server.grpc)
        with Answers(triton) as answers:
            for _ in range(50):
                triton.async_stream_infer("simple", identity_inputs())
            found = [answers.next() for _ in range(50)]
        refused = [isinstance(one, InferenceServerException) for one in found]
        assert any("per-second" in str(one) for one in found) and not all(refused)
        triton.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    made = sorted((row["message"], row["grpc_status"], row.get("model")) for row in rows if "message" in row)
    assert made == [
        (number, "RESOURCE_EXHAUSTED", None) if one else (number, "OK", "simple")
        for number, one in enumerate(refused, 1)
    ]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[Path, Gate]]:
    repository = tmp_path / "gated"
    write_model(repository, "simple", identity_config())
    made = Gate(repository, tmp_path)
    yield repository, made
    made.close()


GATED = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_at_once_than_an_address_may_have(gate: tuple[Path, Gate], kind: str) -> None:
    repository, door = gate
    with start(repository, kind, "--max-concurrent-requests-per-address=1") as server:
        with client(server, kind) as held, client(server, kind) as other:
            stream = held.start("POST", "/v2/models/gate/infer", GATED)
            door.started()
            told_to_wait(other.request("POST", INFER, BODY), 429, "concurrent")
            probes_are_answered(server, kind)
            triton = triton_grpc.InferenceServerClient(server.grpc)
            with pytest.raises(InferenceServerException, match="concurrent") as error:
                triton.infer("simple", identity_inputs())
            assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            door.go()
            assert held.finish(stream).status == 200
            assert other.request("POST", INFER, BODY).status == 200
            assert triton.infer("simple", identity_inputs()) is not None
            triton.close()


@pytest.mark.slow
@without_front_ends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_that_does_not_fit_what_all_may_hold(repository: Path, kind: str, chunked: bool) -> None:
    with start(repository, kind, "--max-held-bytes=4000000") as server:
        with client(server, kind) as sender:
            body = b" " * 6_000_000
            if isinstance(sender, Http2):
                reply = sender.request("POST", INFER, body)
            elif chunked:
                sender.send(
                    b"POST "
                    + INFER.encode()
                    + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                sender.send(b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
                reply = sender.read("POST")
            else:
                reply = sender.request("POST", INFER, body)
            told_to_wait(reply, 503, "--max-held-bytes")
        probes_are_answered(server, kind)
        with client(server, kind) as sender:  # one that fits, and those that nobody is asked for
            assert sender.request("POST", INFER, b" " * 1_000_000).status == 400
            assert sender.request("POST", INFER, BODY).status == 200


@pytest.mark.slow
@without_front_ends
def test_bodies_of_several_clients_count_together(repository: Path) -> None:
    with start(repository, "lean", "--max-held-bytes=4100000") as server:
        with client(server, "lean") as one, client(server, "lean") as two:
            assert isinstance(one, Http1)
            one.send(
                b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                b"Content-Length: 3000000\r\n\r\n"
            )
            interim = one.file.readline()  # the server waits for a body that it has made room for
            assert b"100" in interim
            told_to_wait(two.request("POST", INFER, b" " * 2_000_000), 503, "--max-held-bytes")
            probes_are_answered(server, "lean")

        def fits() -> bool:
            with client(server, "lean") as three:
                return three.request("POST", INFER, b" " * 2_000_000).status == 400

        until(fits, "the room is there again")
