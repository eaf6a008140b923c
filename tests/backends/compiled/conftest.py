"""Libraries of backends, built for the tests, and folders for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as http

from tests.backends.compiled.asking import ONE, TEXT
from tests.support.datatypes import TYPES
from tests.support.repository import write_model
from tests.support.server import ServerProcess

HERE = Path(__file__).parent


def compiled(library: Path, *sources: Path) -> Path:
    """A library built of C files, without anything of this server's."""
    compiler = (os.environ.get("CC") or "cc").split()
    flags = ["-shared", "-fPIC", "-g", "-Werror", "-Wall"]
    subprocess.run([*compiler, *flags, "-o", library, *sources, "-lpthread"], check=True)
    return library


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libtriton_probe.so, built of the .c files here that are not a cache's."""
    sources = sorted(path for path in HERE.glob("*.c") if not path.name.startswith("cache_"))
    return compiled(tmp_path_factory.mktemp("probe") / "libtriton_probe.so", *sources)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --cache-directory with the cache `probe`, built of cache_probe.c."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "probe").mkdir()
    compiled(folder / "probe" / "libtritoncache_probe.so", HERE / "cache_probe.c")
    return folder


@pytest.fixture(scope="session")
def backends(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --backend-directory with the backend `probe`."""
    folder = tmp_path_factory.mktemp("backends")
    (folder / "probe").mkdir()
    shutil.copy(probe, folder / "probe" / probe.name)
    return folder


@pytest.fixture(scope="package")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes traces of requests that ask for one."""
    return tmp_path_factory.mktemp("traces") / "traces.json"


@pytest.fixture(scope="package")
def server(
    backends: Path, trace_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with models of the backend `probe`, for all tests here that do not need another."""
    folder = tmp_path_factory.mktemp("models")
    labelled = 'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] label_filename: "labels.txt" } ] max_batch_size: 8 '
    labelled += 'input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ] backend: "probe"'
    write_model(folder, "labelled", labelled + ONE, {"labels.txt": "größte\n\n"})
    write_model(folder, "identity", 'backend: "probe"')
    # whose meaning is the library's to know
    theirs = 'parameters [ { key: "EXECUTION_ENV_PATH" value: { string_value: "/nowhere" } }, '
    theirs += '{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "no" } } ] '
    write_model(folder, "probe", TEXT + ONE + theirs)
    write_model(folder, "batched", TEXT + ONE + "dynamic_batching { max_queue_delay_microseconds: 300000 }")
    levels = (
        "dynamic_batching { max_queue_delay_microseconds: 20000 priority_levels: 2 default_priority_level: 1 "
    )
    levels += (
        "priority_queue_policy { key: 2 value { timeout_action: REJECT default_timeout_microseconds: 1 } } }"
    )
    write_model(folder, "levels", TEXT + ONE + levels)
    write_model(folder, "stream", TEXT + ONE + "model_transaction_policy { decoupled: true }")
    together = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 30000000 } "
    write_model(folder, "streams", TEXT + ONE + together + "model_transaction_policy { decoupled: true }")
    state = '{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] initial_state: '
    state += '{ name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    write_model(folder, "sum", TEXT + ONE + f"sequence_batching {{ state [ {state} ] }}")
    write_model(folder, "again", TEXT + ONE + "sequence_batching { iterative_sequence: true }")
    decoupled = "model_transaction_policy { decoupled: true } "
    write_model(
        folder, "countdown", TEXT + ONE + decoupled + "sequence_batching { iterative_sequence: true }"
    )
    every = "".join(f'{{ name: "{{0}}_{kind}" data_type: TYPE_{kind} dims: [ -1 ] }},' for kind in TYPES)[:-1]
    text = 'backend: "probe" max_batch_size: 8 input [ ' + every.replace("{0}", "IN")
    steps = 'ensemble_scheduling { step [ { model_name: "probe" model_version: -1 input_map { key: "IN" value: "IN" } '
    steps += 'output_map { key: "TEXT" value: "TEXT" } } ] } platform: "ensemble" max_batch_size: 8 input [ { name: "IN" '
    steps += 'data_type: TYPE_INT32 dims: [ -1 ] } ] output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]'
    write_model(folder, "steps", steps)
    group = 'instance_group [ { count: 1 kind: KIND_CPU passive: true profile: "of another group" }, '
    group += '{ count: 1 kind: KIND_CPU host_policy: "mine" profile: [ "first", "second" ] '
    group += "secondary_devices [ { kind: KIND_NVDLA device_id: 3 } ] } ] "
    write_model(folder, "every", TEXT + group)
    write_model(folder, "types", text + " ] output [ " + every.replace("{0}", "OUT") + " ]" + ONE)
    made = ServerProcess(
        folder,
        f"--backend-directory={backends}",
        "--backend-config=probe,color=green",
        "--backend-config=python,isolation=none",  # not of this one
        f"--trace-config=triton,file={trace_file}",
        "--trace-config=level=OFF",
    )
    yield made
    made.stop()


@pytest.fixture(scope="package")
def client(server: ServerProcess) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(server.http, concurrency=4) as made:
        yield made
