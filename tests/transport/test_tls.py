"""TLS on every port: client certificates on REST and metrics, versions, ciphers, certificates that are renewed."""

from __future__ import annotations

import _ssl
import ctypes
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neptrio.cli import settings_of
from neptrio.loop.socket_writer_core import received_view
from neptrio.service.connections import kept_back
from neptrio.transport import port_server
from neptrio.transport.secure_socket import SecureSocket
from tests.support.certificates import Certificates
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1, Http2
from tests.support.raw_http2 import PREFACE, frame
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

Start = Callable[..., ServerProcess]
SETTINGS = frame(4, 0, 0)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def start(tmp_path: Path, certificates: Certificates) -> Start:
    write_model(tmp_path / "models", "simple", identity_config())
    certificate, key = certificates.issue("server")
    return lambda *flags: ServerProcess(
        tmp_path / "models", f"--http-tls-cert={certificate}", f"--http-tls-key={key}", *flags
    )


@pytest.mark.slow
def test_http_without_tls_is_told_what_the_port_speaks(start: Start, certificates: Certificates) -> None:
    certificate, key = certificates.issue("metrics")
    with start(f"--metrics-tls-cert={certificate}", f"--metrics-tls-key={key}") as server:
        for port in (server.http, server.metrics):
            with Http1(port) as client:
                reply = client.request("GET", "/v2")
            assert (reply.status, reply.body) == (400, b"This port speaks TLS: use https://\n")
        with Http1(server.http, certificates.client("")) as client:
            assert client.request("GET", "/v2").status == 200


@pytest.mark.slow
def test_rest_clients_must_show_a_certificate(start: Start, certificates: Certificates) -> None:
    certificates.issue("known")
    certificates.issue("stranger", trustme.CA())
    with start(f"--http-tls-client-ca={certificates.roots}") as server:
        with Http1(server.http, certificates.client("known")) as client:
            assert client.request("GET", "/v2").status == 200
        with Http2(server.http, certificates.client("known", "h2")) as client:
            assert client.request("GET", "/v2").status == 200
        for name in ("", "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                with Http1(server.http, certificates.client(name)) as client:
                    client.request("GET", "/v2")


@pytest.mark.slow
def test_versions_and_ciphers(start: Start, certificates: Certificates) -> None:
    old = certificates.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with start("--tls-min-version=1.3") as server:
        with Http1(server.http, certificates.client()) as client:
            assert client.sock.version() == "TLSv1.3"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Http1(server.http, old)
    with start("--tls-ciphers=ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305") as server:
        with Http1(server.http, old) as client:
            assert "CHACHA20" in client.sock.cipher()[0]
    with pytest.raises(AssertionError, match="--tls-ciphers: OpenSSL knows no cipher of 'nonsense'"):
        start("--tls-ciphers=nonsense")


def serial(certificates: Certificates, server: ServerProcess) -> str:
    with Http1(server.http, certificates.client()) as client:
        assert client.request("GET", "/v2/health/ready").status == 200
        return str(client.sock.getpeercert()["serialNumber"])


@pytest.mark.slow
def test_a_renewed_certificate_is_shown_and_nobody_dropped(start: Start, certificates: Certificates) -> None:
    files = [certificates.folder / "server.pem", certificates.folder / "server.key"]
    flags = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={files[0]}",
        f"--grpc-server-key={files[1]}",
        "--log-verbose=1",
    ]
    with start(*flags) as server:
        before = serial(certificates, server)
        channel = grpc.secure_channel(
            server.grpc, grpc.ssl_channel_credentials(certificates.roots.read_bytes())
        )
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with Http1(server.http, certificates.client()) as kept:
            assert kept.request("GET", "/v2").status == 200
            assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
            certificates.issue("server")
            server.until_logged("new connections see the certificate", times=2)
            assert serial(certificates, server) != before
            assert kept.request("GET", "/v2").status == 200
            assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
            after = serial(certificates, server)
            files[1].write_bytes(b"no key")
            server.until_logged("the files have changed and cannot be used", times=2)
            assert serial(certificates, server) == after
        channel.close()


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_client_certificates_need_tls(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", f"--{port}-tls-client-ca=roots.pem"])
    assert f"--{port}-tls-client-ca=FILE needs --{port}-tls-cert" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", f"--{port}-tls-key=key.pem"])
    assert f"--{port}-tls-cert=FILE and --{port}-tls-key=FILE belong together" in capsys.readouterr().err


# ---------------------------------------------------------------- metrics


def scrape(server: ServerProcess, context: ssl.SSLContext) -> tuple[int, bytes]:
    with Http1(server.metrics, context) as client:
        reply = client.request("GET", "/metrics")
        return reply.status, reply.body


def metrics_flags(certificates: Certificates) -> list[str]:
    certificate, key = certificates.issue("metrics")
    return [f"--metrics-tls-cert={certificate}", f"--metrics-tls-key={key}"]


def test_metrics_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    old = certificates.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    flags = [*metrics_flags(certificates), "--tls-min-version=1.3"]
    with ServerProcess(tmp_path / "models", *flags) as server:
        server.until_logged("metrics  on https://127.0.0.1:")
        with Http1(server.metrics, certificates.client()) as client:
            for _ in range(3):
                reply = client.request("GET", "/metrics")
                assert (reply.status, b"nv_cpu_utilization" in reply.body) == (200, True)
            assert client.request("POST", "/metrics").status == 405
            assert client.request("GET", "/metrics", headers={"Host": "evil.example"}).status == 403
            before = client.sock.getpeercert()["serialNumber"]
            certificates.issue("metrics")
            server.until_logged("new connections see the certificate")
            assert client.request("GET", "/metrics").status == 200
        with Http1(server.metrics, certificates.client()) as client:
            assert client.sock.getpeercert()["serialNumber"] != before
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Http1(server.metrics, old)
        with Http1(server.http) as client:  # of the other ports nothing was said
            assert client.request("GET", "/v2").status == 200


def test_scrapers_must_show_a_certificate(tmp_path: Path, certificates: Certificates) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    certificates.issue("known")
    certificates.issue("stranger", trustme.CA())
    flags = [*metrics_flags(certificates), f"--metrics-tls-client-ca={certificates.roots}"]
    with ServerProcess(tmp_path / "models", *flags) as server:
        assert scrape(server, certificates.client("known"))[0] == 200
        for name in ("", "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                scrape(server, certificates.client(name))


@pytest.mark.slow
def test_idle_scrapers_make_way(tmp_path: Path, certificates: Certificates) -> None:
    """Of too many connections the one whose last request is oldest is closed, over TLS as well."""
    write_model(tmp_path / "models", "simple", identity_config())
    with (
        ServerProcess(tmp_path / "models", *metrics_flags(certificates), limits="ulimit -n 256") as server,
        ExitStack() as stack,
    ):
        places = kept_back(256) // 8
        clients = [stack.enter_context(Http1(server.metrics, certificates.client())) for _ in range(places)]
        for client in [*clients[1:], clients[0]]:
            assert client.request("GET", "/metrics").status == 200
        with Http1(server.metrics, certificates.client()) as one_more:
            assert one_more.request("GET", "/metrics").status == 200
        assert clients[1].sock.recv(1) == b""
        assert clients[0].request("GET", "/metrics").status == 200


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_a_handshake_that_does_not_come_ends_the_connection(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    monkeypatch.setattr(port_server, "HANDSHAKE_S", 0.1)
    write_model(tmp_path / "models", "simple", identity_config())
    certificate, key = certificates.issue("server")
    files = {"http_tls_cert": certificate, "http_tls_key": key, "grpc_use_ssl": True}
    more = {"grpc_server_cert": certificate, "grpc_server_key": key}
    with EmbeddedServer(tmp_path / "models", **files, **more) as server:
        with Http1(getattr(server, port)) as silent:
            assert silent.closed()


def test_what_was_received_to_notice_an_end_is_had_in_parts(certificates: Certificates) -> None:
    """A large body is received to its place, which may have less room than that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.issue("server"))

    async def main() -> None:
        here, there = socket.socketpair()
        here.setblocking(False)
        secure = SecureSocket(here, context)
        wrap = partial(certificates.client().wrap_socket, there, server_hostname="localhost")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure.handshake)
            client = await trio.to_thread.run_sync(wrap)
        with here, client:
            client.sendall(b"abcdef")
            assert not secure.look()
            parts = []
            while secure.more:
                size = secure.receive(4)
                parts.append(bytes(received_view()[: max(size, 0)]))
            assert parts == [b"abcd", b"ef", b""]

    trio.run(main)


# ---------------------------------------------------------------- key updates

RECEIVE_TIMEOUT = struct.pack("ll", 30, 0)


def openssl() -> Any:
    """The library behind `ssl`, which has no call for key updates; skips where its names are not to be had."""
    try:
        library = ctypes.CDLL(_ssl.__file__)
        for name in ("SSL_CTX_new", "SSL_new", "TLS_client_method"):
            getattr(library, name).restype = ctypes.c_void_p
        library.SSL_key_update.restype = ctypes.c_int
    except (AttributeError, OSError):
        pytest.skip("this Python does not show its OpenSSL")
    return library


def updated_keys(address: str, most: int) -> int:
    """Asks for new keys `most` times over TLS 1.3 and reads nothing; how often that went before the server ended it."""
    library = openssl()
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, direction, RECEIVE_TIMEOUT)
        context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
        library.SSL_CTX_set_alpn_protos(context, b"\x02h2", 3)
        client = ctypes.c_void_p(library.SSL_new(context))
        library.SSL_set_fd(client, sock.fileno())
        try:
            assert library.SSL_connect(client) == 1
            library.SSL_write(client, PREFACE + SETTINGS, len(PREFACE + SETTINGS))
            for done in range(most):
                library.SSL_key_update(client, 1)
                if library.SSL_do_handshake(client) != 1:
                    return done
            return most
        finally:
            library.SSL_free(client)
            library.SSL_CTX_free(context)


@pytest.mark.slow
def test_a_client_that_asks_for_keys_and_does_not_read(start: Start, certificates: Certificates) -> None:
    """Each request is answered with a record, and nothing else in TLS bounds how many wait for it."""
    files = certificates.folder / "server.pem", certificates.folder / "server.key"
    flags = ("--grpc-use-ssl=true", f"--grpc-server-cert={files[0]}", f"--grpc-server-key={files[1]}")
    with start(*flags) as server:
        with Http2(server.http, certificates.client("", "h2")) as neighbour:
            assert neighbour.request("GET", "/v2").status == 200
            assert updated_keys(server.grpc, 500_000) < 500_000
            assert neighbour.request("GET", "/v2").status == 200
