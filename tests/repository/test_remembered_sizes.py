"""What models held is known at the next start (repository.remembered_sizes)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.repository import remembered_sizes, scan
from neptrio.repository.putting_away import HOST
from neptrio.repository.remembered_sizes import HEAD, HIDDEN, Remembered, Size
from tests.support.repository import write_model
from tests.support.server import ServerProcess


def kept(file: Path) -> dict[str, Size]:
    """What a server that starts now would know."""
    return Remembered(file).read()


def keep(file: Path, **models: int) -> Remembered:
    made = Remembered(file)
    for name, held in models.items():
        made.note(name, f"files of {name}", {HOST: held, 1: 7 * held}, 0.25)
    made.write(made.snapshot())
    return made


def test_what_is_written_is_read_and_counts_for_the_same_files_only(tmp_path: Path) -> None:
    file = tmp_path / "beside" / "sizes"
    keep(file, a=10, b=20)
    later = Remembered(file)
    later.take(later.read())
    assert later.of("a", "files of a") == Size("files of a", 10, 0.25, {1: 70}) and not later.due
    assert later.of("a", "other files") is None and later.of("c", "") is None
    later.note("c", "", {HOST: 5}, 0.1)  # a load call has brought its files
    assert not later.due
    later.note("b", "files of b", {HOST: 30}, 0.25)
    assert later.due
    later.write(later.snapshot())
    assert not later.due and kept(file)["b"].held == 30
    assert [path.name for path in file.parent.iterdir()] == ["sizes"], "nothing is left beside it"


def test_what_others_have_written_stays(tmp_path: Path) -> None:
    file = tmp_path / "sizes"
    keep(file, theirs=1, both=2)
    keep(file, both=3, ours=4)
    assert {name: size.held for name, size in kept(file).items()} == {"theirs": 1, "both": 3, "ours": 4}


def test_what_was_measured_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_sizes, "MOST", 3)
    file = tmp_path / "sizes"
    keep(file, a=1, b=2, c=3)
    made = keep(file, d=4, a=1)
    assert list(kept(file)) == ["c", "d", "a"]
    for name in "efg":
        made.note(name, "files", {HOST: 1}, 0.1)
    assert list(made.snapshot()) == ["e", "f", "g"]


LINE = {"name": "a", "files": "x", "held": 1, "seconds": 0.1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no text of ours\n",
        "{}\n",
        json.dumps(HEAD) + "\n{",
        json.dumps(HEAD) + "\n[1]\n",
        json.dumps(HEAD) + "\n" + "[" * 200_000 + "\n",
        *(
            json.dumps(HEAD) + "\n" + json.dumps({**LINE, key: value}) + "\n"
            for key, value in (
                ("name", 1), ("files", None), ("held", -1), ("held", 1 << 60), ("held", True), ("seconds", "x"),
                ("seconds", float("nan")), ("gpus", []), ("gpus", {"x": 1}), ("gpus", {"0": -1}),
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_such_file_is_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sizes"
    file.write_text(text)
    assert kept(file) == {}
    assert len(caplog.records) == 1 and "is measured again" in caplog.text
    keep(file, a=1)
    assert list(kept(file)) == ["a"]


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("a file")
    made = keep(tmp_path / "folder" / "sizes", a=1)
    made.note("b", "files", {HOST: 1}, 0.1)
    assert not made.due
    made.write(made.snapshot())
    assert len(caplog.records) == 1 and "--model-cache-directory names another folder" in caplog.text


def test_a_server_starts_where_the_folder_cannot_be_looked_into(tmp_path: Path) -> None:
    unreadable = tmp_path / ("n" * 300)  # which the system refuses, also to who may read any folder
    models = tmp_path / "models"
    models.mkdir()
    flags = ["--model-control-mode=on-demand", "--model-memory-budget=1GiB"]
    with ServerProcess(models, *flags, f"--model-cache-directory={unreadable}") as server:
        server.until_logged("what models hold is not taken from ")


def test_two_states_of_a_folder_have_digests_of_their_own() -> None:
    state = {"1/": (0, -1), "1/model.py": (5, 10)}
    assert scan.digest(state) == scan.digest(dict(reversed(state.items())))
    others = (
        {**state, "1/model.py": (6, 10)},
        {**state, "1/model.py": (5, 11)},
        {**state, "2/": (0, -1)},
        {},
    )
    assert len({scan.digest(each) for each in (state, *others)}) == 5


WEIGHTY = """
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = numpy.ones(60 << 20, numpy.uint8)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
CONFIG = """backend: "python" max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] """


def infer(running: ServerProcess) -> None:
    given = httpclient.InferInput("INPUT0", [1], "INT32")
    given.set_data_from_numpy(np.ones(1, np.int32))
    with httpclient.InferenceServerClient(running.http) as client:
        client.infer("weighty", [given])


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False], ids=["repository", "folder"])
def test_a_start_knows_what_models_held_before_it(tmp_path: Path, beside: bool) -> None:
    repository, folder = tmp_path / "models", tmp_path / "kept"
    repository.mkdir()
    model = write_model(repository, "weighty", CONFIG, {"1/model.py": WEIGHTY})
    flags = ["--model-control-mode=on-demand", *(() if beside else (f"--model-cache-directory={folder}",))]
    with ServerProcess(repository, *flags, "--model-memory-budget=200MiB") as running:
        infer(running)
    assert (repository / HIDDEN).exists() == beside
    with ServerProcess(repository, *flags, "--model-memory-budget=50MiB") as running:
        with pytest.raises(InferenceServerException, match="MiB, more than") as refused:
            infer(running)
        taken = re.search(r"takes about (\d+\.\d) MiB", str(refused.value))
        # its weights, what its process holds besides, and a quarter; by its files it would be 16
        assert taken is not None and 75 < float(taken[1]) < 150
        (model / "1" / "model.py").write_text(WEIGHTY.replace("60 << 20", "6 << 20"))
        infer(running)
