"""What a connection was is freed at its end, without the collector."""

from __future__ import annotations

import gc
import logging
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from neptrio.transport.http2.h2_session import let_go
from tests.support.certificates import Certificates
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1, Http2
from tests.support.repository import identity_config, write_model
from tests.support.streams import Answers
from tests.support.waiting import until

INFER = "/v2/models/identity/infer"
BODY = b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[1]}]}'
LARGE = b'{"inputs":[{"name":"INPUT0","shape":[100000],"datatype":"FP32","data":[%s1]}]}' % (b"1," * 99_999)
KINDS = {
    *("Http1Connection", "Exchange", "HttpInfer", "InferRequest"),
    *("GrpcConnection", "UnaryInfer", "StreamInfer", "HandlerCall"),
    *("RestHttp2Connection", "Http2Exchange", "RestStream", "HTTPStream", "H2Connection", "Wire"),
    *("SocketWriter", "SecureSocketWriter", "SecureSocket", "SSLObject", "SSLStream", "TCPServer"),
}

Close = Callable[[], None]
Connect = Callable[[EmbeddedServer, Certificates], Close]


@pytest.fixture(autouse=True)
def kept_log(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged is kept, as a program may do that embeds a server: it is to keep nothing of a connection."""
    caplog.set_level(logging.DEBUG, "neptrio")


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[EmbeddedServer]:
    write_model(folder / "models", "identity", identity_config("TYPE_FP32", "-1", 0, 1))
    with EmbeddedServer(folder / "models", **settings) as server:
        server.until(server.grpc_server.handlers_loaded.is_set, "no thread imports anything any more")
        gc.collect()
        gc.disable()
        try:
            yield server
        finally:
            gc.enable()


def ask_all(client: Http1 | Http2) -> None:
    assert client.request("GET", "/v2").status == 200
    for method, path, body in (("GET", "/v2", b""), ("POST", INFER, BODY)):
        assert client.request(method, path, body, {"Host": "evil.example"}).status == 403
    for body in (BODY, LARGE):
        assert client.request("POST", INFER, body).status == 200
    assert client.request("POST", "/v2/models/unknown/infer", BODY).status == 404
    assert client.request("POST", INFER, b"{").status == 400


def connect_http1(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http)
    ask_all(client)
    return client.close


def connect_https(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http, certificates.client())
    ask_all(client)
    return client.close


def connect_http2(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http2(server.http)
    ask_all(client)

    def close() -> None:
        client.close()
        let_go(client.connection)  # the client's own

    return close


def leave_in_the_middle(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http)
    client.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{" % INFER.encode())
    return client.close


def reset(sock: socket.socket) -> Close:
    """A close that tells the server of an error where it reads."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sock.close


def reset_in_the_middle(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http)
    ask_all(client)
    client.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{" % INFER.encode())
    return partial(close_both, client, reset(client.sock))


def reset_https(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http, certificates.client())
    ask_all(client)
    return partial(close_both, client, reset(client.sock))


def close_both(client: Http1, close: Close) -> None:
    client.close()
    close()


def reset_http2(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http2(server.http)
    ask_all(client)
    let_go(client.connection)  # the client's own
    return reset(client.sock)


def reset_grpc(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http2(server.grpc)
    client.start("POST", "/inference.GRPCInferenceService/ModelStreamInfer", b"\0\0\0\0\5half")
    client.pump()
    let_go(client.connection)
    return reset(client.sock)


def send_no_http(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http)
    client.send(b"no HTTP at all\r\n\r\n")
    assert client.read().status >= 400
    return client.close


def leave_the_handshake(server: EmbeddedServer, certificates: Certificates) -> Close:
    client = Http1(server.http)
    client.send(b"\x16\x03")
    return client.close


def connect_grpc(server: EmbeddedServer, certificates: Certificates, **options: Any) -> Close:
    client = grpcclient.InferenceServerClient("localhost:" + server.grpc.split(":")[1], **options)
    tensor = grpcclient.InferInput("INPUT0", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    client.infer("identity", [tensor])
    client.get_model_repository_index()
    for refused in (
        lambda: client.infer("unknown", [tensor]),
        lambda: client.get_model_config("unknown"),
        lambda: client.get_inference_statistics("unknown"),
    ):
        with pytest.raises(InferenceServerException, match="unknown"):
            refused()
    answers = Answers(client)
    client.async_stream_infer("identity", [tensor])
    answers.result()
    client.async_stream_infer("unknown", [tensor])
    assert "unknown" in str(answers.error())

    def close() -> None:
        client.stop_stream()
        client.close()

    return close


def connect_grpcs(server: EmbeddedServer, certificates: Certificates) -> Close:
    return connect_grpc(server, certificates, ssl=True, root_certificates=str(certificates.roots))


def count() -> Counter[str]:
    names = (type(one).__qualname__ for one in gc.get_objects())
    return Counter(name for name in names if name in KINDS)


def alive(server: EmbeddedServer) -> Counter[str]:
    """How many objects of connections and their requests there are, by type.

    Counted on the server's thread: a tuple that another thread is just making may not be seen (CPython raises SystemError
    there, "bad argument to internal function").
    """
    return server.ask(count)


def check_freed(server: EmbeddedServer, certificates: Certificates, connect: Connect) -> None:
    before = alive(server)
    close = connect(server, certificates)
    until(lambda: alive(server) - before, "a connection is seen while it lasts")
    close()
    del close
    until(lambda: not alive(server) - before, lambda: alive(server) - before, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "connect",
    [connect_http1, connect_http2, leave_in_the_middle, reset_in_the_middle, reset_http2, send_no_http],
)
def test_rest(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path) as server:
        check_freed(server, Certificates(tmp_path), connect)


@pytest.mark.slow
@pytest.mark.parametrize("connect", [connect_grpc, reset_grpc])
@pytest.mark.parametrize("session", ["h2", "nghttp2"])
def test_grpc(tmp_path: Path, session: str, connect: Connect) -> None:
    if session == "nghttp2":
        pytest.importorskip("neptrio.transport.http2.nghttp2_session")
    with serving(tmp_path, session=session) as server:
        check_freed(server, Certificates(tmp_path), connect)


@pytest.mark.slow
@pytest.mark.parametrize("connect", [connect_https, connect_grpcs, leave_the_handshake, reset_https])
def test_tls(tmp_path: Path, connect: Connect) -> None:
    certificates = Certificates(tmp_path)
    certificate, key = certificates.issue("server")
    files = {
        "http_tls_cert": certificate,
        "http_tls_key": key,
        "grpc_use_ssl": True,
        "grpc_server_cert": certificate,
        "grpc_server_key": key,
    }
    with serving(tmp_path, **files) as server:
        check_freed(server, certificates, connect)


@pytest.mark.slow
def test_one_that_was_idle_for_too_long(tmp_path: Path) -> None:
    """Whoever ends it keeps nothing of it."""
    with serving(tmp_path, http_keep_alive_timeout_secs=0.2) as server:
        before = alive(server)
        with Http1(server.http) as client:
            assert client.request("GET", "/v2").status == 200
            assert client.closed()
        until(lambda: not alive(server) - before, lambda: alive(server) - before, 20)
