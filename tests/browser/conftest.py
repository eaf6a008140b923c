"""One browser and one server with models of all sorts, for all tests of the console that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.panels import BROKEN, HOSTILE
from tests.sequences.models import sequence_config
from tests.support import browser
from tests.support.browser import Chromium
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

NAMES = [name for name in browser.installed() if name in browser.CHROMIUM]
PICTURE = (
    'backend: "identity" max_batch_size: 4 input [ { name: "INPUT0" data_type: TYPE_UINT8 dims: [ 3, 2, 2 ] } ] '
    'output [ { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ 3, 2, 2 ] } ]'
)
BYTES = (
    'backend: "identity" max_batch_size: 4 input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ] '
    'output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]'
)
PASS = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())]) for r in requests]
"""
RAISES = f"""
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError({BROKEN!r})
    def execute(self, requests):
        pass
"""
COUNTS = """
import numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(4, i, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS = f"""
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_warn({BROKEN!r})
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError({BROKEN!r})) for _ in requests]
"""
CONFIG = (
    'backend: "python" input [ { name: "IN" data_type: TYPE_INT32 dims: [ 4 ] } ] '
    'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 4 ] } ] instance_group [ { count: 2 kind: KIND_CPU } ]'
)
CHAIN = (
    'platform: "ensemble" input [ { name: "A" data_type: TYPE_INT32 dims: [ 4 ] } ] output [ { name: "B" '
    "data_type: TYPE_INT32 dims: [ 4 ] } ] ensemble_scheduling { step [ "
    '{ model_name: "apart" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "M" } }, '
    '{ model_name: "fails" model_version: -1 input_map { key: "IN" value: "M" } output_map { key: "OUT" value: "B" } } ] }'
)


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("repository")
    write_model(folder, "simple", identity_config())
    write_model(folder, HOSTILE, identity_config())
    write_model(folder, "picture", PICTURE)
    write_model(folder, "words", BYTES)
    write_model(folder, "sums", sequence_config("direct { }", 4))
    write_model(folder, "broken", CONFIG, {"1/model.py": RAISES})
    write_model(
        folder, "counts", CONFIG + "model_transaction_policy { decoupled: true }", {"1/model.py": COUNTS}
    )
    write_model(folder, "fails", CONFIG, {"1/model.py": FAILS})
    write_model(folder, "chain", CHAIN)
    write_model(folder, "apart", CONFIG, {"1/model.py": PASS})
    return folder


@pytest.fixture(scope="package")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--allow-forced-trace=true",
             "--trace-config=triton,file=" + str(tmp_path_factory.mktemp("traces") / "trace.json"),
             "--cache-config=local,size=1000000")  # fmt: skip
    with ServerProcess(repository, *flags, failures="ValueError") as process:
        yield process


@pytest.fixture(scope="package")
def started() -> Iterator[Chromium]:
    if not NAMES:
        pytest.skip("no chromium on PATH: the console is not drawn")
    tab = browser.start(NAMES[0])
    assert isinstance(tab, Chromium)
    try:
        yield tab
    finally:
        tab.close()


@pytest.fixture
def tab(started: Chromium, server: ServerProcess) -> Iterator[Chromium]:
    """The browser. In the end no script was stopped by the policy, nothing failed, and nobody else was asked."""
    started.look(1280, 900)
    yield started
    # a request that the server refuses is a message too, which the console shows
    strange = [text for text in started.messages if "the server responded with a status of" not in text]
    assert not strange
    assert all(url.startswith(("http://127.0.0.1:", "about:")) for url in started.network), started.network
