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

from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity_inputs
from tests.transport.conftest import SESSIONS


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
