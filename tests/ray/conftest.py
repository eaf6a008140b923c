"""A real Ray on this machine, for `make test-ray`. Without Ray none of these tests is collected.

NEPTRIO_TEST_RAY=1, which that target sets, makes a missing Ray an error.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

if os.environ.get("NEPTRIO_TEST_RAY") != "1" and importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray and its proxies; gives their ports."""
    import ray
    from ray import serve

    import neptrio.ray
    from tests.ray.support import Ports

    ports = Ports(free_port(), free_port())
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "neptrio.ray.proxy.middlewares"
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": ports.http},
        grpc_options={"port": ports.grpc, "grpc_servicer_functions": neptrio.ray.GRPC_SERVICERS},
    )
    yield ports
    serve.shutdown()
    ray.shutdown()
