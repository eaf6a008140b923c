"""When the garbage collector looks at what: at young objects, and at everything only where there is a reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.loop.collector import CALM_LOOKS, FEW_PASSES, LOOK_SECONDS, MODEL_BLOCKS, Growth
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

MODELS = 300

# writes the generation of each collection in the server's process, and how many objects a full one looks at
WATCHING = """
import gc
import os

class TritonPythonModel:
    def initialize(self, args):
        file = os.open(os.path.join(args["model_repository"], "collections"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        def told(phase, info):
            if phase == "start":
                objects = len(gc.get_objects()) if info["generation"] == 2 else 0
                os.write(file, f"{info['generation']} {objects}\\n".encode())
        gc.callbacks.append(told)

    def execute(self, requests):
        return [None for _ in requests]
"""
HERE = 'parameters { key: "isolation" value { string_value: "none" } } '
PYTHON = (
    'backend: "python" input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ] '
    'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ] ' + HERE
)

# its module refers to itself, and tells when it is freed
LEFT = """
import pathlib

class Left:
    def __del__(self):
        self.freed.touch()

class TritonPythonModel:
    def initialize(self, args):
        global left
        left = Left()
        left.freed = pathlib.Path(args["model_repository"], "freed")

    def execute(self, requests):
        return [None for _ in requests]
"""

# 1 makes many objects that refer to themselves, 2 drops them
HOLDS = """
import pathlib
import triton_python_backend_utils as pb_utils

class First:
    def __init__(self, freed):
        self.itself, self.freed = self, freed

    def __del__(self):
        self.freed.touch()

class TritonPythonModel:
    def initialize(self, args):
        self.freed = pathlib.Path(args["model_repository"], "freed")
        self.held = []

    def execute(self, requests):
        for request in requests:
            asked = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]
            if asked == 1:
                self.held.append(First(self.freed))
                for _ in range(80_000):
                    one = []
                    one.append(one)
                    self.held.append(one)
            elif asked == 2:
                self.held.clear()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
                for r in requests]
"""


class Watched:
    """A server of which it is known what it collects."""

    def __init__(self, folder: Path, client: httpclient.InferenceServerClient) -> None:
        self.repository = folder.parent
        self._file = folder / "collections"
        self.client = client

    def collections(self) -> list[tuple[int, int]]:
        """(generation, objects looked at, 0 if it was not a full one) of each collection so far."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [(int(generation), int(objects)) for generation, objects in (line.split() for line in lines)]

    def full(self, since: int = 0) -> list[int]:
        """How many objects each full collection looked at, of those after the first `since` collections."""
        return [objects for generation, objects in self.collections()[since:] if generation == 2]

    def cycle(self, name: str) -> None:
        """Loads and unloads a model."""
        self.client.load_model(name)
        self.client.unload_model(name)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    repository = tmp_path_factory.mktemp("collector")
    for i in range(MODELS):
        write_model(repository, f"plain{i}", identity_config())
    write_model(repository, "holds", PYTHON, {"1/model.py": HOLDS})
    folder = write_model(repository, "watching", PYTHON, {"1/model.py": WATCHING})
    write_model(repository, "left", PYTHON, {"1/model.py": LEFT})
    flags = ("--model-control-mode=explicit", "--load-model=watching", "--load-model=left")
    with ServerProcess(repository, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        made = Watched(folder, client)
        # What is imported while the server serves already is the start's. A call that needs it tells that it is there.
        with grpcclient.InferenceServerClient(server.grpc) as calls:
            assert calls.is_server_live()
        made.cycle("plain0")
        assert not made.full(), "the start ends without a look at everything"
        yield made


@pytest.mark.slow
def test_a_server_that_rests_does_not_look_at_what_its_start_has_made(watched: Watched) -> None:
    before, rest = time.monotonic(), (CALM_LOOKS + 2) * LOOK_SECONDS
    until(lambda: time.monotonic() - before > rest, "it has rested")
    assert not watched.full()


def test_each_load_looks_at_young_objects(watched: Watched) -> None:
    before = len(watched.collections())
    for _ in range(20):
        watched.cycle("plain0")
    assert [generation for generation, _ in watched.collections()[before:]].count(1) >= 20


@pytest.mark.slow
def test_however_many_models_there_are_loads_and_unloads_look_at_young_objects_only(watched: Watched) -> None:
    before = len(watched.collections())
    for i in range(MODELS):
        watched.client.load_model(f"plain{i}")
    for i in range(MODELS):
        watched.client.unload_model(f"plain{i}")
    assert not watched.full(before)


@pytest.mark.slow
def test_a_models_own_code_is_freed_at_its_unload(watched: Watched) -> None:
    """Though the start had loaded it, and hidden it with all else."""
    freed = watched.repository / "left" / "freed"
    assert not freed.exists()
    watched.client.unload_model("left")
    until(freed.exists, "what the model's module held is freed")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.getallocatedblocks() == 0, reason="PYTHONMALLOC=malloc: nobody counts what Python's objects take"
)
def test_what_is_dropped_is_freed_when_the_process_has_grown(watched: Watched) -> None:
    client, freed = watched.client, watched.repository / "holds" / "freed"
    tensor = httpclient.InferInput("X", [1], "FP32")

    def ask(what: int) -> None:
        tensor.set_data_from_numpy(np.array([what], np.float32))
        client.infer("holds", [tensor])

    def dropped() -> bool:
        # more than once: what a look finds held is no growth any more
        ask(1)
        ask(2)
        return freed.exists()

    client.load_model("holds")
    until(dropped, "everything is looked at")
    client.unload_model("holds")


def test_a_server_rests_when_its_loop_has_next_to_nothing_to_do() -> None:
    growth, passes = Growth(), 0
    for _ in range(3 * CALM_LOOKS):
        passes += FEW_PASSES + 1
        assert not growth.rests(passes), "somebody asks again and again"
    rests = []
    for _ in range(CALM_LOOKS):
        passes += FEW_PASSES
        rests.append(growth.rests(passes))
    assert rests == [False] * (CALM_LOOKS - 1) + [True]
    assert not growth.rests(passes + FEW_PASSES + 1)


def test_what_models_explain_is_no_growth() -> None:
    growth = Growth()
    growth.looked(100_000, 10)
    assert not growth.too_much(125_000, lambda: 10, rests=True)
    assert growth.too_much(125_001, lambda: 10, rests=True)
    assert not growth.too_much(200_000, lambda: 10, rests=False), (
        "it never rests: only when it is twice as large"
    )
    assert growth.too_much(200_001, lambda: 10, rests=False)
    explained = 100_000 + 1_000 * MODEL_BLOCKS
    assert not growth.too_much(explained * 5 // 4, lambda: 1_010, rests=True)
    assert growth.too_much(explained * 5 // 4 + 1, lambda: 1_010, rests=True)


def test_after_models_have_gone_growth_counts_from_what_is_left() -> None:
    growth = Growth()
    growth.looked(400_000, 1_000)
    assert not growth.too_much(100_000, lambda: 10, rests=True)
    assert growth.too_much(130_000, lambda: 10, rests=True)
