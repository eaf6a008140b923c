"""Health, reflection, the grpclib Stream contract, TLS, keep-alive, compression, drain."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trio
import tritonclient.grpc as grpcclient
import trustme
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpclib.const import Cardinality, Handler, Status
from hyperframe.frame import PingFrame
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from neptrio._proto.inference import ServerLiveRequest, ServerLiveResponse
from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity, request, response, stream_response
from tests.support.raw_http2 import LIVE, STREAM_INFER, RawClient, message
from tests.support.server import ServerProcess
from tests.transport.conftest import SESSIONS

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
NO_ERROR, ENHANCE_YOUR_CALM = 0, 11


def rows(module: Any) -> list[Any]:
    made = []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [1, 16], "INT32")
        tensor.set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16) + i)
        made.append(tensor)
    return made


# ---------------------------------------------------------------- health and reflection


@pytest.mark.parametrize("service", [b"", b"\x0a\x04nope"])
def test_health_check(raw: RawClient, service: bytes) -> None:
    assert raw.call(1, service, CHECK).messages == [b"\x08\x01"]


def test_health_watch_follows_readiness(server: EmbeddedServer) -> None:
    metadata = server.server.services.metadata
    with RawClient(server.grpc) as client:
        client.send(client.headers(1, WATCH) + client.data(1, message(b"")))
        reply = client.replies[1]
        client.until(lambda: reply.messages == [b"\x08\x01"], "SERVING")
        server.ask(setattr, metadata, "exiting", True)
        client.until(lambda: reply.messages == [b"\x08\x01", b"\x08\x02"], "NOT_SERVING")
        server.ask(setattr, metadata, "exiting", False)
        client.until(lambda: reply.messages[2:] == [b"\x08\x01"], "SERVING again")

        model = server.ask(server.server.repository.lookup, "identity")
        backend = model.pool.instances[0].backend
        for healthy, status in ((False, b"\x08\x02"), (True, b"\x08\x01")):
            server.ask(setattr, backend, "healthy", healthy)
            server.ask(backend.on_health)
            count = len(reply.messages) + 1
            client.until(lambda n=count: len(reply.messages) == n, "the model's health")  # type: ignore[misc]
            assert reply.messages[-1] == status
        client.reset(1)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection(server: EmbeddedServer, version: str) -> None:
    """As grpcurl does it: list the services, take the files of each, find a message in them."""
    ask = reflection_pb2.ServerReflectionRequest
    questions = [
        ask(list_services="*"),
        ask(file_containing_symbol="inference.GRPCInferenceService"),
        ask(file_by_filename="model_config.proto"),
        ask(file_containing_symbol="no.such.Symbol"),
        ask(all_extension_numbers_of_type="inference.ModelConfig"),
        ask(
            file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="x", extension_number=1)
        ),
        ask(),
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=ask.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        got = list(call(iter(questions)))
    assert [r.original_request for r in got] == questions
    services = {s.name for s in got[0].list_services_response.service}
    assert services == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(f)
        for f in got[1].file_descriptor_response.file_descriptor_proto
    ]
    assert [f.name for f in files] == ["grpc_service.proto", "model_config.proto"]
    assert {m.name for m in files[0].service[0].method} >= {"ModelInfer", "ModelStreamInfer", "ServerLive"}
    assert "ModelConfig" in {
        m.name
        for f in got[2].file_descriptor_response.file_descriptor_proto
        for m in descriptor_pb2.FileDescriptorProto.FromString(f).message_type
    }
    assert got[3].error_response.error_code == 5
    assert got[4].all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    assert got[5].error_response.error_code == 5
    assert got[6].error_response.error_code == 3


# ---------------------------------------------------------------- the contract of handlers


@pytest.fixture
def mounted(server: EmbeddedServer) -> Iterator[Any]:
    """mount(function): serves it as the handler of /test/Echo."""

    def mount(function: Any, cardinality: Cardinality = Cardinality.STREAM_STREAM) -> str:
        handler = Handler(function, cardinality, ServerLiveRequest, ServerLiveResponse)
        server.ask(server.grpc_server.handlers.__setitem__, b"/test/Echo", handler)
        return "/test/Echo"

    yield mount
    server.ask(server.grpc_server.handlers.pop, b"/test/Echo", None)


@pytest.fixture
def late(server: EmbeddedServer) -> Iterator[Any]:
    """late(): from here on the handlers are there. Before that, the server is as one that just started."""
    front = server.grpc_server
    server.until(front.handlers_loaded.is_set, "the handlers")
    held = dict(front.handlers)

    def begin() -> None:
        front.handlers_loaded = trio.Event()
        front.handlers.clear()

    def end() -> None:
        front.handlers |= held
        front.handlers_loaded.set()

    server.ask(begin)
    yield lambda: server.ask(end)
    server.ask(end)


def test_calls_wait_for_the_handlers(raw: RawClient, late: Any) -> None:
    """Calls that come while the handlers are being imported; infer requests do not wait for that."""
    raw.send(raw.headers(1, LIVE) + raw.data(1, message(b"")))
    raw.send(raw.headers(3, "/test/None") + raw.data(3, message(b"")))
    raw.send(raw.headers(5, LIVE) + raw.data(5, message(b"") + message(b"")))
    raw.send(raw.headers(7, WATCH) + raw.data(7, message(b"")))
    assert raw.call(9, identity()).status == 0
    assert not any(raw.replies[stream].headers for stream in (1, 3, 5, 7))
    late()
    assert raw.finish(1).messages == [b"\x08\x01"]
    assert raw.finish(3).status == 12 and raw.replies[3].text == ""
    assert raw.finish(5).status == 12 and "got a second one" in raw.replies[5].text
    raw.until(lambda: raw.replies[7].messages == [b"\x08\x01"], "SERVING")
    raw.reset(7)


def test_handlers_see_metadata_deadline_and_peer(raw: RawClient, mounted: Any) -> None:
    seen: dict[str, Any] = {}

    async def handler(stream: Any) -> None:
        seen.update(
            metadata=list(stream.metadata.items()),
            remaining=stream.deadline.time_remaining(),
            agent=stream.user_agent,
            peer=stream.peer.addr(),
            messages=[m async for m in stream],
        )
        await stream.send_initial_metadata(metadata={"a": "1", "b-bin": b"\0\xff"})
        await stream.send_message(ServerLiveResponse(live=True))
        await stream.send_trailing_metadata(
            status=Status.DATA_LOSS, status_message="50 % lost", metadata={"c": "2", "d-bin": b"\1"}
        )

    path = mounted(handler)
    extra = [("x-bin", "AP8=,AQ"), ("y", "z"), ("y", "zz"), ("grpc-timeout", "100S")]
    raw.send(raw.headers(1, path, extra) + raw.data(1, message(b"") + message(b"")))
    reply = raw.finish(1)
    assert seen["metadata"] == [("x-bin", b"\0\xff"), ("x-bin", b"\1"), ("y", "z"), ("y", "zz")]
    assert 90 < seen["remaining"] <= 100 and seen["agent"] == "raw" and seen["peer"][0] == "127.0.0.1"
    assert len(seen["messages"]) == 2
    assert reply.headers[0]["a"] == "1" and reply.headers[0]["b-bin"] == "AP8"
    assert reply.messages == [b"\x08\x01"]
    assert reply.status == 15 and reply.text == "50 %25 lost"
    assert reply.headers[-1]["c"] == "2" and reply.headers[-1]["d-bin"] == "AQ"


def test_a_handler_that_raises(raw: RawClient, mounted: Any) -> None:
    async def handler(stream: Any) -> None:
        raise RuntimeError("kaputt")

    reply = raw.call(1, b"", mounted(handler))
    assert reply.status == 13 and reply.text == "RuntimeError: kaputt"
    assert raw.call(3, identity()).status == 0


def test_a_handler_that_cancels(raw: RawClient, mounted: Any) -> None:
    async def handler(stream: Any) -> None:
        await stream.cancel()

    raw.start(1, b"", mounted(handler))
    assert raw.finish(1).reset == 8


def test_a_handler_waits_for_a_client_that_does_not_read(server: EmbeddedServer, mounted: Any) -> None:
    sent = []

    async def handler(stream: Any) -> None:
        for i in range(1000):
            sent.append(i)
            await stream.send_message(b"\0" * 100_000)

    path = mounted(handler, Cardinality.UNARY_STREAM)
    with RawClient(server.grpc, credit=False) as client:
        client.start(1, b"", path)
        server.until(lambda: len(sent) > 5, "some are sent")
        client.sync()
        assert len(sent) < 20  # 1 MiB of messages wait, not 100 MB
        client.reset(1)
        server.until_idle()
        assert len(sent) < 20


# ---------------------------------------------------------------- response compression


@pytest.mark.parametrize(("level", "used"), [("low", "gzip"), ("medium", "deflate"), ("high", "deflate")])
def test_response_compression(grpc_repository: Path, level: str, used: str) -> None:
    large = np.zeros(1 << 20, np.uint8)
    with EmbeddedServer(grpc_repository, grpc_infer_response_compression_level=level) as server:
        with RawClient(server.grpc) as client:
            accept = [("grpc-accept-encoding", "identity, deflate, gzip")]
            for stream_id, tensor in ((1, large[:1000]), (3, large)):
                client.start(stream_id, request("big", tensor), extra=accept)
                reply = client.finish(stream_id)
                assert reply.headers[0]["grpc-encoding"] == used and reply.data[0] == 1
                assert len(reply.data) < 5000
            client.start(5, request("big", large[:1000]), extra=[("grpc-accept-encoding", "gzip")])
            assert client.finish(5).headers[0]["grpc-encoding"] == "gzip"
            reply = client.call(7, request("big", large[:1000]))
            assert "grpc-encoding" not in reply.headers[0] and reply.data[0] == 0
        with grpcclient.InferenceServerClient(server.grpc) as real:
            given = grpcclient.InferInput("INPUT0", large.shape, "UINT8")
            given.set_data_from_numpy(large)
            result = real.infer("big", [given], compression_algorithm="gzip")
            assert np.array_equal(result.as_numpy("OUTPUT0"), large)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(real._channel)
            asked = [
                service_pb2.ModelInferRequest.FromString(request("big", large[: 1 << n], request_id=str(n)))
                for n in (3, 20, 4, 18, 5)
            ]
            got = [r.infer_response for r in stub.ModelStreamInfer(iter(asked))]
            assert [(r.id, len(r.raw_output_contents[0])) for r in got] == [
                (str(n), 1 << n) for n in (3, 20, 4, 18, 5)
            ]
        server.until_idle()


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("certificates")
    root, stranger = trustme.CA(), trustme.CA()
    paths = {}
    for name, issuer in (("server", root), ("client", root), ("stranger", stranger)):
        made = issuer.issue_cert("localhost", "127.0.0.1")
        paths[f"{name}_key"] = str(folder / f"{name}.key")
        paths[f"{name}_cert"] = str(folder / f"{name}.pem")
        made.private_key_pem.write_to_path(paths[f"{name}_key"])
        for part in made.cert_chain_pems:
            part.write_to_path(paths[f"{name}_cert"], append=True)
    paths["root"] = str(folder / "root.pem")
    root.cert_pem.write_to_path(paths["root"])
    return paths


def tls_client(address: str, paths: dict[str, str], who: str | None) -> Any:
    return grpcclient.InferenceServerClient(
        address,
        ssl=True,
        root_certificates=paths["root"],
        private_key=paths[f"{who}_key"] if who else None,
        certificate_chain=paths[f"{who}_cert"] if who else None,
    )


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("mutual", [False, True])
def test_tls(grpc_repository: Path, certificates: dict[str, str], session: str, mutual: bool) -> None:
    settings = {
        "grpc_use_ssl": True,
        "grpc_use_ssl_mutual": mutual,
        "grpc_server_cert": Path(certificates["server_cert"]),
        "grpc_server_key": Path(certificates["server_key"]),
        "grpc_root_cert": Path(certificates["root"]),
    }
    with EmbeddedServer(grpc_repository, session, **settings) as server:
        with tls_client(server.grpc, certificates, "client" if mutual else None) as client:
            result = client.infer("identity", rows(grpcclient), request_id="t")
            assert result.get_response().id == "t"
            large = np.frombuffer(np.random.default_rng(2).bytes(8 << 20), np.uint8)
            given = grpcclient.InferInput("INPUT0", large.shape, "UINT8")
            given.set_data_from_numpy(large)
            assert np.array_equal(client.infer("big", [given]).as_numpy("OUTPUT0"), large)
        if mutual:
            for who in (None, "stranger"):
                with tls_client(server.grpc, certificates, who) as client:
                    with pytest.raises(InferenceServerException) as info:
                        client.infer("identity", rows(grpcclient), client_timeout=20)
                    assert info.value.status() == "StatusCode.UNAVAILABLE"
        host, _, port = server.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as plain:  # no TLS: ends there
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while plain.recv(4096):
                pass
        with tls_client(server.grpc, certificates, "client" if mutual else None) as client:
            assert client.is_server_live()
        server.until_idle()


def test_tls_settings_that_cannot_work(grpc_repository: Path, certificates: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs --grpc-server-cert"):
        EmbeddedServer(grpc_repository, grpc_use_ssl=True)
    with pytest.raises(BaseExceptionGroup) as info:
        EmbeddedServer(
            grpc_repository,
            grpc_use_ssl=True,
            grpc_server_cert=Path(certificates["server_cert"]),
            grpc_server_key=Path("/nope.key"),
        )
    error: BaseException = info.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OSError) and "cannot use the certificate" in str(error)


# ---------------------------------------------------------------- ping, keep-alive, age


def test_ping_is_answered(raw: RawClient) -> None:
    raw.ping(b"abcdefgh")
    raw.until(lambda: any(isinstance(f, PingFrame) for f in raw.frames), "its echo")
    (echo,) = (f for f in raw.frames if isinstance(f, PingFrame))
    assert "ACK" in echo.flags and echo.opaque_data == b"abcdefgh"


def test_too_many_pings_without_calls(server: EmbeddedServer) -> None:
    with RawClient(server.grpc) as client:
        for _ in range(4):  # the first, then two strikes, then out
            client.ping()
        client.until_closed()
        assert client.goaway is not None and client.goaway.error_code == ENHANCE_YOUR_CALM


def test_pings_of_a_busy_client_are_welcome(raw: RawClient) -> None:
    for i in range(20):
        raw.ping()
        assert raw.call(2 * i + 1, identity()).status == 0
    assert raw.goaway is None


@pytest.mark.parametrize("session", SESSIONS)
def test_a_peer_that_answers_no_ping_is_dropped(grpc_repository: Path, session: str) -> None:
    with EmbeddedServer(
        grpc_repository,
        session,
        grpc_keepalive_time_ms=30,
        grpc_keepalive_timeout_ms=50,
        grpc_keepalive_permit_without_calls=True,
    ) as server:
        with RawClient(server.grpc) as client:
            client._handle = lambda frame: None  # type: ignore[method-assign]
            client.until_closed()
        with RawClient(server.grpc) as client:  # one that answers stays
            seen = 0
            while seen < 3:
                seen += sum(type(f).__name__ == "PingFrame" for f in client.read())
                assert not client.closed
            assert not client.closed and client.call(1, identity()).status == 0


@pytest.mark.parametrize("session", SESSIONS)
def test_connection_age(grpc_repository: Path, session: str) -> None:
    with EmbeddedServer(grpc_repository, session, grpc_max_connection_age_ms=50) as server:
        with RawClient(server.grpc) as client:
            client.start(1, identity(model="slow"))
            client.until(lambda: client.goaway is not None, "GOAWAY")
            assert client.finish(1).status == 0
            client.until_closed()
            assert client.goaway.error_code == NO_ERROR  # type: ignore[union-attr]
    with EmbeddedServer(
        grpc_repository, session, grpc_max_connection_age_ms=50, grpc_max_connection_age_grace_ms=20
    ) as server:
        with RawClient(server.grpc) as client:
            client.start(1, identity(model="slower"))
            client.until_closed()
            assert not client.replies[1].headers
        server.until_idle()


# ---------------------------------------------------------------- drain


@pytest.mark.parametrize("session", SESSIONS)
def test_sigterm_answers_what_is_in_flight(grpc_repository: Path, session: str) -> None:
    """Unary, stream with open requests, idle stream, Watch, idle connection: each its right end."""
    process = ServerProcess(grpc_repository, env={**os.environ, "NEPTRIO_HTTP2_SESSION": session})
    with RawClient(process.grpc) as client, RawClient(process.grpc) as idle, RawClient(process.grpc) as mute:
        mute._handle = lambda frame: None  # type: ignore[method-assign]  # does not answer PING either
        for i in (1, 3, 5):
            client.start(i, identity(f"u{i}", "slow"))
        two = message(identity("s0", "slow")) + message(identity("s1"))
        client.send(client.headers(7, STREAM_INFER) + client.data(7, two, end=False))
        client.send(client.headers(9, STREAM_INFER) + client.data(9, b"", end=False))
        client.send(client.headers(11, WATCH) + client.data(11, message(b"")))
        client.until(lambda: client.replies[11].messages, "Watch answers")
        stopped = threading.Thread(target=lambda: statuses.append(process.stop()))
        statuses: list[int] = []
        stopped.start()
        client.until(lambda: client.goaway is not None, "GOAWAY")
        for i in (1, 3, 5):
            reply = client.finish(i)
            assert reply.status == 0 and response(*reply.messages).id == f"u{i}"
        reply = client.finish(7)
        assert [stream_response(m).infer_response.id for m in reply.messages] == ["s0", "s1"]
        shutting_down = "GRPC server is shutting down and has stopped accepting new requests."
        for i in (7, 9, 11):
            assert client.finish(i).status == 14 and client.replies[i].text == shutting_down
        client.until_closed()
        assert client.goaway is not None and client.goaway.error_code == NO_ERROR
        idle.until_closed()
        assert idle.goaway is not None and idle.goaway.error_code == NO_ERROR
        mute.until_closed()
        stopped.join(30)
    assert statuses == [0]


def test_calls_that_cross_the_goaway_are_answered(grpc_repository: Path) -> None:
    for session in SESSIONS:
        with EmbeddedServer(grpc_repository, session) as server:
            with RawClient(server.grpc) as client:
                client.start(1, identity("before", "slow"))
                client.sync()
                connection = next(iter(server.grpc_server._connections))
                server.ask(connection.start_drain)
                client.start(3, identity("crossed"))  # sent before the GOAWAY was read
                assert client.finish(3).status == 0
                assert client.finish(1).status == 0
                client.until_closed()


def test_real_clients_reconnect_after_a_drain(grpc_repository: Path) -> None:
    with EmbeddedServer(grpc_repository) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            assert client.is_server_live()
            for connection in list(server.grpc_server._connections):
                server.ask(connection.start_drain)
            assert client.infer("identity", rows(grpcclient), request_id="r").get_response().id == "r"


def test_binary_metadata_from_the_real_client(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        metadata = (("x-bin", bytes(range(256))), ("y", "z"))
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), metadata=metadata).live
        made = service_pb2.ModelInferRequest.FromString(identity("m"))
        assert stub.ModelInfer(made, metadata=metadata).id == "m"


def test_real_deadlines_and_cancels(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException) as info:
            client.infer("slower", rows(grpcclient), client_timeout=0.05)
        assert info.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        done: list[Any] = []
        came = threading.Event()
        call = client.async_infer(
            "slower", rows(grpcclient), lambda result, error: (done.append(error), came.set())
        )
        call.cancel()
        assert came.wait(20) and done[0].status() == "StatusCode.CANCELLED"
    server.until_idle()


def test_live(raw: RawClient) -> None:
    assert raw.call(1, b"", LIVE).messages == [b"\x08\x01"]
