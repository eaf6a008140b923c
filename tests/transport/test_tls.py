"""TLS on both ports: client certificates on REST, versions, ciphers, certificates that are renewed."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neptrio.cli import settings_of
from tests.support.http import Http1, Http2
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


class Certificates:
    """A root, and what it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = trustme.CA()
        self.roots = folder / "root.pem"
        self.root.cert_pem.write_to_path(str(self.roots))

    def issue(self, name: str, issuer: trustme.CA | None = None) -> tuple[Path, Path]:
        """(certificate, key), each written in one step."""
        made = (issuer or self.root).issue_cert("localhost", "127.0.0.1")
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        contents = b"".join(part.bytes() for part in made.cert_chain_pems), made.private_key_pem.bytes()
        for path, content in zip(paths, contents, strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            os.replace(new, path)
        return paths

    def client(self, name: str = "", alpn: str = "http/1.1") -> ssl.SSLContext:
        """A client that trusts the root, with the certificate of `name` if there is one."""
        context = ssl.create_default_context(cafile=str(self.roots))
        context.set_alpn_protocols([alpn])
        if name:
            context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context


Start = Callable[..., ServerProcess]


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


def test_client_certificates_need_tls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", "--http-tls-client-ca=roots.pem"])
    assert "--http-tls-client-ca=FILE needs --http-tls-cert" in capsys.readouterr().err
