"""What a model may ask of the server before it serves and after: in its file, auto_complete_config(), initialize(), finalize()."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, isolated, python_model
from tests.backends.python.test_bls import DOUBLE
from tests.support.metrics import scrape, value
from tests.support.server import ServerProcess

ASKS = """
import asyncio
import sys
import threading
import numpy as np

def request():
    tensor = pb_utils.Tensor("IN", np.array([21], np.float32))
    return pb_utils.InferenceRequest(model_name="double", inputs=[tensor], requested_output_names=["OUT"])

NAME = __file__.split("/")[-3]

def tell(where, response):
    print(NAME, where, response.output_tensors()[0].as_numpy()[0], file=sys.stderr, flush=True)
"""
CALLS = (
    ASKS
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.ask("initialize")

    def ask(self, where):
        tell(where, request().exec())
        thread = threading.Thread(target=lambda: tell(where + " thread", request().exec()))
        thread.start()
        thread.join()

    def execute(self, requests):
        raise RuntimeError("not here")

    def finalize(self):
        self.ask("finalize")
"""
)
AWAITS = (
    ASKS
    + """
class TritonPythonModel:
    async def initialize(self, args):
        await self.ask("initialize")

    async def ask(self, where):
        for n, response in enumerate(await asyncio.gather(request().async_exec(), request().async_exec())):
            tell(where + " thread" * n, response)

    async def execute(self, requests):
        raise RuntimeError("not here")

    async def finalize(self):
        await self.ask("finalize")
"""
)
COMPLETES = (
    ASKS
    + """
pb_utils.Logger.log_warn(f"{NAME} says what its file does")
FAMILY = pb_utils.MetricFamily("asked_before", "how often", pb_utils.MetricFamily.COUNTER)

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        FAMILY.Metric({}).increment(1)
        if "%s" == "calls":
            request().exec()
        pb_utils.Logger.log_warn(f"{NAME} completes its configuration")
        return config

    def execute(self, requests):
        raise RuntimeError("not here")
"""
)
COUNTS = """
FAMILY = pb_utils.MetricFamily("counted", "how often", pb_utils.MetricFamily.COUNTER)
METRIC = FAMILY.Metric({})

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        METRIC.increment(100)
        return config

    def initialize(self, args):
        METRIC.increment(1)

    def execute(self, requests):
        raise RuntimeError("not here")
"""
WAYS = {"process": "process", "interpreter": sys.prefix, "none": "none"}
FEW_SECONDS = ' parameters { key: "INITIALIZE_TIMEOUT_SECONDS" value: { string_value: "10" } }'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "double", DOUBLE)
    models = {"calls": CALLS, "awaits": AWAITS, "tells": COMPLETES % "", "completes": COMPLETES % "calls"}
    for name, code in models.items():
        for way, place in WAYS.items():
            isolated(repository, f"{name}_{way}", code, config() + FEW_SECONDS, place)
    python_model(repository, "counts", COUNTS)
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=double") as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["calls", "awaits"])
def test_calls_of_other_models(server: ServerProcess, model: str, way: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model(f"{model}_{way}")
        client.unload_model(f"{model}_{way}")
    for where in ("initialize", "initialize thread", "finalize", "finalize thread"):
        server.until_logged(f"{model}_{way} {where} 42.0")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_file_and_auto_complete_config(server: ServerProcess, way: str) -> None:
    """They may log and make metrics; each has its own process, which imports the file."""
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model(f"tells_{way}")
        client.unload_model(f"tells_{way}")
    server.until_logged(f"tells_{way} says what its file does", 2)
    server.until_logged(f"tells_{way} completes its configuration")


@pytest.mark.slow
def test_metrics_of_auto_complete_config_end_with_its_process(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model("counts")
        assert value(scrape(server), "counted") == 1
        client.unload_model("counts")


@pytest.mark.parametrize("way", WAYS)
def test_a_call_from_auto_complete_config_is_refused(server: ServerProcess, way: str) -> None:
    with (
        httpclient.InferenceServerClient(server.http) as client,
        pytest.raises(InferenceServerException) as failed,
    ):
        client.load_model(f"completes_{way}")
    assert "TritonModelException: " in str(failed.value)
    assert ("needs a running server" if way == "none" else "auto_complete_config() cannot send") in str(
        failed.value
    )
