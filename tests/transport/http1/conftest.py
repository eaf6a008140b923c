"""The servers of the REST suites."""

from tests.transport.rest.conftest import (
    connect,
    front,
    http_repository,
    hypercorn_server,
    impatient_server,
    lean_server,
)

__all__ = [
    "connect",
    "front",
    "http_repository",
    "hypercorn_server",
    "impatient_server",
    "lean_server",
]
