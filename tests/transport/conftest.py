"""Servers for the gRPC transport's tests: one per HTTP/2 session, with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model

SESSIONS = ["h2", *(["nghttp2"] if find_spec("neptrio.transport.http2.nghttp2_session") else [])]
DELAY = 'parameters {{ key: "execute_delay_ms" value: {{ string_value: "{}" }} }}'


def delay(ms: int) -> str:
    """The configuration text that makes an identity model slow."""
    return DELAY.format(ms)


STUCK = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        until_cancelled(*requests)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("too late")) for _ in requests]
"""


@pytest.fixture(scope="session")
def gated_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Gate]]:
    repository = tmp_path_factory.mktemp("grpc_repository")
    write_model(repository, "identity", identity_config())
    write_model(repository, "slow", identity_config(extra=delay(200)))
    write_model(repository, "big", identity_config("TYPE_UINT8", "-1", 0, 1))
    stuck = identity_config().replace('"identity"', '"python"')
    write_model(repository, "stuck", stuck, {"1/model.py": UNTIL_CANCELLED + STUCK})
    second = 'input [ { name: "INPUT1" data_type: TYPE_INT32 dims: [ -1 ] } ]'
    gate = Gate(repository, tmp_path_factory.mktemp("gate"), extra=second)
    yield repository, gate
    gate.close()


@pytest.fixture(scope="session")
def grpc_repository(gated_repository: tuple[Path, Gate]) -> Path:
    """identity; slow (200 ms); stuck (until it is cancelled); gate; big (bytes of any number, unbatched)."""
    return gated_repository[0]


@pytest.fixture
def gate(gated_repository: tuple[Path, Gate]) -> Gate:
    """The test's side of the model `gate`."""
    gated_repository[1].forget()
    return gated_repository[1]


@pytest.fixture(scope="module", params=SESSIONS)
def embedded(grpc_repository: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server whose gRPC front uses the session named by the parameter."""
    with EmbeddedServer(grpc_repository, request.param) as server:
        yield server


@pytest.fixture
def server(embedded: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """`embedded`, checked to hold nothing after the test."""
    yield embedded
    embedded.until_idle()


@pytest.fixture
def raw(server: EmbeddedServer) -> Iterator[RawClient]:
    """A raw connection to the server."""
    with RawClient(server.grpc) as client:
        yield client
