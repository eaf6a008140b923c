"""gRPC over TLS: one-sided and mutual, strangers, settings that cannot work."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import trustme
from tritonclient.utils import InferenceServerException

from tests.support.certificates import Certificates
from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity_inputs
from tests.transport.conftest import SESSIONS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    for name, issuer in (("server", made.root), ("client", made.root), ("stranger", trustme.CA())):
        made.issue(name, issuer)
    return made


def tls_client(address: str, certificates: Certificates, who: str | None) -> Any:
    chain, key = map(str, certificates.files(who)) if who else (None, None)
    return grpcclient.InferenceServerClient(
        address,
        ssl=True,
        root_certificates=str(certificates.roots),
        private_key=key,
        certificate_chain=chain,
    )


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("mutual", [False, True])
def test_tls(grpc_repository: Path, certificates: Certificates, session: str, mutual: bool) -> None:
    certificate, key = certificates.files("server")
    settings = {
        "grpc_use_ssl": True,
        "grpc_use_ssl_mutual": mutual,
        "grpc_server_cert": certificate,
        "grpc_server_key": key,
        "grpc_root_cert": certificates.roots,
    }
    with EmbeddedServer(grpc_repository, session, **settings) as server:
        with tls_client(server.grpc, certificates, "client" if mutual else None) as client:
            result = client.infer("identity", identity_inputs(), request_id="t")
            assert result.get_response().id == "t"
            large = np.frombuffer(np.random.default_rng(2).bytes(8 << 20), np.uint8)
            given = grpcclient.InferInput("INPUT0", large.shape, "UINT8")
            given.set_data_from_numpy(large)
            assert np.array_equal(client.infer("big", [given]).as_numpy("OUTPUT0"), large)
        if mutual:
            for who in (None, "stranger"):
                with tls_client(server.grpc, certificates, who) as client:
                    with pytest.raises(InferenceServerException) as info:
                        client.infer("identity", identity_inputs(), client_timeout=60)
                    assert info.value.status() == "StatusCode.UNAVAILABLE"
        host, _, port = server.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as plain:  # no TLS: ends there
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while plain.recv(4096):
                pass
        with tls_client(server.grpc, certificates, "client" if mutual else None) as client:
            assert client.is_server_live()
        server.until_idle()


def test_tls_settings_that_cannot_work(grpc_repository: Path, certificates: Certificates) -> None:
    with pytest.raises(ValueError, match="needs --grpc-server-cert"):
        EmbeddedServer(grpc_repository, grpc_use_ssl=True)
    with pytest.raises(BaseExceptionGroup) as info:
        EmbeddedServer(
            grpc_repository,
            grpc_use_ssl=True,
            grpc_server_cert=certificates.files("server")[0],
            grpc_server_key=Path("/nope.key"),
        )
    error: BaseException = info.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OSError) and "cannot use the certificate" in str(error)
