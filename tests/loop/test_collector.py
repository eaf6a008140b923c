"""When the garbage collector looks at what: full collections come at rest, or after a model's own code has left cycles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as httpclient

from neptrio.loop.collector import CALM_LOOKS, DUE, FEW_PASSES, Rest
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

# writes the generation of each collection in the server's process
WATCHING = """
import gc
import os

class TritonPythonModel:
    def initialize(self, args):
        file = os.open(os.path.join(args["model_repository"], "collections"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        def told(phase, info):
            if phase == "stop":
                os.write(file, f"{info['generation']}".encode())
        gc.callbacks.append(told)

    def execute(self, requests):
        return [None for _ in requests]
"""
HERE = 'parameters { key: "isolation" value { string_value: "none" } } '
PYTHON = (
    'backend: "python" input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ] '
    'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ] ' + HERE
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


class Watched:
    """A server of which it is known what it collects."""

    def __init__(self, folder: Path, client: httpclient.InferenceServerClient) -> None:
        self.repository = folder.parent
        self._file = folder / "collections"
        self.client = client

    def collections(self) -> str:
        """The generations of all collections so far."""
        return self._file.read_text() if self._file.exists() else ""

    def cycle(self, name: str) -> None:
        """Loads and unloads a model."""
        self.client.load_model(name)
        self.client.unload_model(name)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    repository = tmp_path_factory.mktemp("collector")
    write_model(repository, "plain", identity_config())
    write_model(
        repository, "here", PYTHON, {"1/model.py": WATCHING.replace("gc.callbacks.append(told)", "pass")}
    )
    folder = write_model(repository, "watching", PYTHON, {"1/model.py": WATCHING})
    write_model(repository, "left", PYTHON, {"1/model.py": LEFT})
    flags = ("--model-control-mode=explicit", "--load-model=watching", "--load-model=left")
    with ServerProcess(repository, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        made = Watched(folder, client)
        until(lambda: "2" in made.collections(), "the start is over, which ends with a full collection")
        yield made


def test_loads_and_unloads_look_at_young_objects_only(watched: Watched) -> None:
    before = watched.collections()
    for _ in range(20):
        watched.cycle("plain")
    new = watched.collections().removeprefix(before)
    assert new.count("1") >= 20 and "2" not in new, new


def test_after_the_unload_of_a_models_own_code_everything_is_looked_at(watched: Watched) -> None:
    before = watched.collections()
    watched.cycle("here")
    until(lambda: "2" in watched.collections().removeprefix(before), watched.collections)


def test_a_model_that_the_start_has_loaded_is_freed_when_it_is_unloaded(watched: Watched) -> None:
    freed = watched.repository / "left" / "freed"
    assert not freed.exists()
    watched.client.unload_model("left")
    until(freed.exists, "what the model's module held is freed")


def test_everything_is_looked_at_when_the_server_rests(watched: Watched) -> None:
    before = watched.collections()
    for _ in range(DUE):
        watched.cycle("plain")
    assert "2" not in watched.collections().removeprefix(before)
    until(lambda: "2" in watched.collections().removeprefix(before), watched.collections)


def test_a_server_rests_when_its_loop_has_next_to_nothing_to_do() -> None:
    rest, passes = Rest(), 0
    for _ in range(3 * CALM_LOOKS):
        passes += FEW_PASSES + 1
        assert not rest.look(passes, DUE), "somebody asks again and again"
    looks = []
    for _ in range(CALM_LOOKS):
        passes += FEW_PASSES
        looks.append(rest.look(passes, DUE))
    assert looks == [False] * (CALM_LOOKS - 1) + [True]
    assert not rest.look(passes, DUE - 1), "nothing is due"
