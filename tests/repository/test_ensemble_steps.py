"""Ensembles whose steps' models are loaded anew while loads of the ensembles are under way."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from neptrio.errors import TritonError
from neptrio.repository.override import LoadParameters
from tests.support import slow_models
from tests.support.control import load, progress
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.latch import Latch
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until, until_trio

pytestmark = pytest.mark.slow

TENSOR = 'name: "{}" data_type: TYPE_INT32 dims: [ -1 ]'
ENSEMBLE = f"""platform: "ensemble" input [ {{ {TENSOR.format("IN")} }} ] output [ {{ {TENSOR.format("OUT")} }} ]
ensemble_scheduling {{ step [ {{ model_name: "step" model_version: -1
  input_map {{ key: "INPUT0" value: "IN" }} output_map {{ key: "OUTPUT0" value: "OUT" }} }} ] }}
"""
STEP = """
import json, os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.output = json.loads(args["model_config"])["output"][0]["name"]
        held = os.path.join(args["model_repository"], "latch")
        if os.path.exists(held):
            with open(held) as latch:
                latch.read()

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(self.output, pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())]
            )
            for r in requests
        ]
"""
# keeps the loader thread, not that of an instance
IMPORT = """
import pathlib
folder = pathlib.Path(__file__).parent.parent
(folder / "imported").touch()
(folder / "latch").read_text()
"""
OTHER_NAME = ('"OUTPUT0"', '"RESULT0"')


def answer(server: ServerProcess | EmbeddedServer, name: str = "both") -> tuple[int, Any]:
    with Http1(server.http) as http:
        tensor = {"name": "IN", "datatype": "INT32", "shape": [2], "data": [3, 4]}
        reply = http.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}).encode())
        return reply.status, json.loads(reply.body)


class Loads:
    """Load calls that run side by side."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._threads: list[threading.Thread] = []
        self.statuses: dict[str, int] = {}

    def begin(self, name: str, phase: str) -> None:
        """Sends one, and waits until the load is in that phase."""
        thread = threading.Thread(target=self._load, args=(name,))
        thread.start()
        self._threads.append(thread)
        until(lambda: progress(self._server, name).get("loading", {}).get("phase") == phase, phase)

    def _load(self, name: str) -> None:
        self.statuses[name] = load(self._server, name).status

    def end(self) -> dict[str, int]:
        for thread in self._threads:
            thread.join(60)
        return self.statuses


@pytest.mark.parametrize("broken", [False, True], ids=["finds nothing to do", "fails"])
def test_a_load_of_the_ensemble_that_makes_nothing_does_not_keep_the_models_that_are_gone(
    tmp_path: Path, broken: bool
) -> None:
    repository = tmp_path / "models"
    step = write_model(repository, "step", slow_models.CONFIG, {"1/model.py": STEP})
    other = write_model(
        repository, "other", slow_models.CONFIG, {"1/model.py": IMPORT + slow_models.MODEL, "latch": ""}
    )
    both = write_model(repository, "both", ENSEMBLE)
    flags = ("--model-control-mode=explicit", "--load-model=both", "--model-load-thread-count=1")
    with ServerProcess(repository, *flags) as server:
        assert answer(server)[1]["outputs"][0]["data"] == [3, 4]
        (step / "config.pbtxt").write_text(slow_models.CONFIG.replace(*OTHER_NAME))
        (other / "latch").unlink()
        with Latch(step / "latch") as initializing, Latch(other / "latch") as importing:
            loads = Loads(server)
            loads.begin("step", "initializing instances")
            loads.begin("other", "loading files")
            until((other / "imported").exists, "the only loader thread is taken")
            if broken:
                (both / "config.pbtxt").write_text(ENSEMBLE + "nonsense")
            loads.begin("both", "reading the configuration")
            initializing.open()
            server.until_logged("successfully loaded 'step' version 1", times=2)
            importing.open()
            statuses = loads.end()
        assert (statuses["step"], statuses["other"]) == (200, 200)
        assert statuses["both"] != 200, "it asks for an output that its step does not make"
        until(lambda: answer(server)[0] == 404, lambda: answer(server))
        (both / "config.pbtxt").write_text(ENSEMBLE.replace(*OTHER_NAME))
        assert load(server, "both").status == 200
        assert answer(server)[1]["outputs"][0]["data"] == [3, 4]


def test_loads_that_were_given_up_do_not_forget_the_one_that_followed(tmp_path: Path) -> None:
    step = slow_models.slow_model(tmp_path, "step")
    names = [f"both{number}" for number in range(16)]  # of models that never served nothing is kept
    for name in names:
        write_model(tmp_path, name, ENSEMBLE)
    with EmbeddedServer(tmp_path, model_control_mode="explicit") as server:
        repository = server.server.repository

        async def given_up(name: str) -> None:
            with suppress(TritonError):
                await repository.load(name, {})

        async def loads(number: int, latch: Latch) -> None:
            """Two loads of the ensemble are outdated, and a third one follows when one of them has ended, or both have."""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(given_up, names[number])
                await until_trio(lambda: slow_models.loads(step) == number + 1)
                nursery.start_soon(given_up, names[number])
                await until_trio(lambda: len(repository.records[names[number]].operations) == 2)
                repository.withdrawal.unload(names[number], False)
                for _ in range(number % 4):
                    await trio.lowlevel.checkpoint()
                third = repository.loads.begin(names[number], LoadParameters())
                latch.open()
                await third.done.wait()

        for number, name in enumerate(names):
            with slow_models.latch(step) as latch:
                server.run(loads, number, latch)
            assert answer(server, name)[1]["outputs"][0]["data"] == [3, 4]
            server.run(repository.unload, name, False)
            assert answer(server, name)[0] != 200, "it is unloaded"
            server.run(repository.unload, "step", False)
            server.until(lambda: not any(r.retiring for r in repository.records.values()), "it has ended")
            (step / "latch").unlink()
