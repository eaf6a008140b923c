"""What a connection was is freed at its end, without the collector."""

from __future__ import annotations

import gc
import http.client
import queue
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from neptrio.transport.grpc.stream_infer import StreamInfer
from neptrio.transport.http1.connection import Http1Connection
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.waiting import until

BODY = b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[1]}]}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    write_model(tmp_path, "identity", identity_config("TYPE_FP32", "-1", 0, 1))
    with EmbeddedServer(tmp_path) as made:
        gc.collect()
        gc.disable()
        try:
            yield made
        finally:
            gc.enable()


def connect_http(server: EmbeddedServer) -> Callable[[], None]:
    client = http.client.HTTPConnection(server.http)
    for request in (("GET", "/v2"), ("POST", "/v2/models/identity/infer", BODY)):
        client.request(*request)
        client.getresponse().read()
    return client.close


def connect_stream(server: EmbeddedServer) -> Callable[[], None]:
    client = grpcclient.InferenceServerClient(server.grpc)
    got: queue.Queue[Any] = queue.Queue()
    tensor = grpcclient.InferInput("INPUT0", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    client.start_stream(lambda result, error: got.put(error))
    client.async_stream_infer("identity", [tensor])
    assert got.get(timeout=60) is None

    def close() -> None:
        client.stop_stream()
        client.close()

    return close


@pytest.mark.parametrize(
    ("kind", "connect"), [(Http1Connection, connect_http), (StreamInfer, connect_stream)]
)
def test_what_has_ended_is_freed(
    server: EmbeddedServer, kind: type, connect: Callable[[EmbeddedServer], Callable[[], None]]
) -> None:
    close = connect(server)
    found = [weakref.ref(one) for one in gc.get_objects() if type(one) is kind]
    assert len(found) == 1
    close()
    until(lambda: found[0]() is None, "it is freed")
