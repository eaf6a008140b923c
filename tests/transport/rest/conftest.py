"""Servers and clients for the suites that run over every HTTP front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.http import Http1, Http2
from tests.support.metrics import scrape
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

ALL_TYPES = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
]


def write_models(repository: Path) -> None:
    """The models of the HTTP suites."""
    write_model(repository, "simple", identity_config())
    write_model(repository, "slow", identity_config(extra=delay(400)))
    write_model(repository, "nobatch", identity_config(max_batch_size=0, pairs=1))
    write_model(repository, "two", identity_config(pairs=1, dims="2", datatype="TYPE_FP32"), versions=(1, 2))
    write_model(repository, "text", identity_config("TYPE_STRING", dims="1", pairs=1))
    write_model(repository, "texts", identity_config("TYPE_STRING", dims="-1", pairs=1))
    write_model(repository, "matrix", identity_config("TYPE_FP32", dims="-1, -1", pairs=1))
    write_model(repository, "many", identity_config("TYPE_FP32", dims="-1", pairs=1))
    for name in ALL_TYPES:
        write_model(repository, name.lower(), identity_config(f"TYPE_{name}", dims="-1", pairs=1))
    write_model(
        repository, "decoupled", identity_config(extra="model_transaction_policy { decoupled: true }")
    )
    write_model(
        repository,
        "optional",
        'backend: "identity" max_batch_size: 8 input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }, '
        '{ name: "B" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ] '
        'output [ { name: "C" data_type: TYPE_INT32 dims: [ 1 ] } ]',
    )
    write_model(
        repository,
        "classes",
        'backend: "identity" max_batch_size: 8 input [ { name: "I" data_type: TYPE_FP32 dims: [ 4 ] } ] '
        'output [ { name: "O" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]',
        {"labels.txt": "zero\none\ntwo\n"},
    )
    write_model(
        repository,
        "ints",
        'backend: "identity" max_batch_size: 0 input [ { name: "I" data_type: TYPE_INT32 dims: [ 4 ] } ] '
        'output [ { name: "O" data_type: TYPE_INT32 dims: [ 4 ] } ]',
    )


def delay(ms: int) -> str:
    """The identity backend's parameter that makes every execution take that long."""
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{ms}" }} }}'


@pytest.fixture(scope="session")
def http_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("http-models")
    write_models(repository)
    return repository


def controls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags that open the control verbs."""
    folder = tmp_path_factory.mktemp("traces")
    return "--model-control-mode=explicit", "--load-model=*", f"--trace-dir={folder}"


@pytest.fixture(scope="session")
def lean_server(http_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with our own connections."""
    with ServerProcess(http_repository, *controls(tmp_path_factory)) as process:
        yield process
        until(lambda: in_flight(process) == 0, "every request is answered")


@pytest.fixture(scope="session")
def impatient_server(http_repository: Path) -> Iterator[ServerProcess]:
    """Like lean_server, for what never arrives: a request has two seconds."""
    with ServerProcess(http_repository, "--http-request-timeout-secs=2") as process:
        yield process


@pytest.fixture(scope="session")
def hypercorn_server(
    http_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """hypercorn for everything."""
    with ServerProcess(http_repository, "--http-lean=false", *controls(tmp_path_factory)) as process:
        yield process
        until(lambda: in_flight(process) == 0, "every request is answered")


def in_flight(process: ServerProcess) -> float:
    """Requests accepted and not answered, over all models that have had one, from the metrics endpoint."""
    text = scrape(process)
    lines = [line for line in text.splitlines() if line.startswith("neptrio_accepted_requests{")]
    assert "\nneptrio_" in text
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def accepted(process: ServerProcess, model: str) -> int:
    """Requests that a model has accepted since it was loaded, answered or not."""
    return int(stats(process, model)["accounts"]["accepted"])


Connect = Callable[[], Http1 | Http2]


@pytest.fixture(params=["lean", "hypercorn", "http2"])
def front(request: pytest.FixtureRequest) -> ServerProcess:
    """A server, once per front; `connect` opens a connection to it."""
    name = "hypercorn_server" if request.param == "hypercorn" else "lean_server"
    process: ServerProcess = request.getfixturevalue(name)
    return process


@pytest.fixture
def connect(front: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens connections to the front under test; they are closed behind the test."""
    opened: list[Http1 | Http2] = []
    kind = Http2 if request.node.callspec.params["front"] == "http2" else Http1

    def make() -> Http1 | Http2:
        opened.append(kind(front.http))
        return opened[-1]

    yield make
    for connection in opened:
        connection.close()
