"""`neptrio check` and the check of a live server: every problem, with its place."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neptrio.backends.onnx import signature as onnx_signature
from neptrio.backends.registry import names
from neptrio.repository.check import Checker
from neptrio.settings import Settings
from tests.client.test_ensembles import ENSEMBLE
from tests.support import onnx_models
from tests.support.control import CONFIG, load, post, refused
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

PYTHON = """backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
GOOD_MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def check(*arguments: str) -> tuple[int, str]:
    """Status and output of `neptrio check`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "neptrio", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def problems(repository: Path, *arguments: str) -> list[str]:
    """The lines of problems, with paths relative to the repository."""
    status, text = check(str(repository), *arguments)
    lines = text.replace(f"{repository}/", "").splitlines()
    assert status == int(any(line.startswith("error") for line in lines)), text
    return lines[:-1]


@pytest.mark.slow
def test_a_good_repository_has_no_problems(tmp_path: Path) -> None:
    write_model(tmp_path, "first", identity_config())
    write_model(tmp_path, "second", identity_config())
    write_model(tmp_path, "ens", ENSEMBLE)
    write_model(tmp_path, "bare", "", {"1/model.onnx": onnx_models.add_sub()})
    (tmp_path / "bare" / "config.pbtxt").unlink()
    write_model(tmp_path, "python", PYTHON, {"1/model.py": GOOD_MODEL})
    status, text = check(str(tmp_path))
    assert (status, text) == (0, "5 models: 5 without errors; 0 errors, 0 warnings\n")
    assert json.loads(check(str(tmp_path), "--json")[1])["models"][0] == {
        "name": "bare",
        "ok": True,
        "versions": ["1"],
        "problems": [],
    }


@pytest.mark.slow
def test_every_problem_of_a_configuration_is_told(tmp_path: Path) -> None:
    text = """name: "m"
backend: "identity"
max_batch_size: -3
wrong_field: 1
input [
  { name: "A" data_type: TYPE_INT33 dims: [ 4 ] },
  { name: "A" data_type: TYPE_INT32 dims: [ 0 ] }
]
output { name: "B" data_type: TYPE_INT32
  dims: [ 4 ]
  label_filename: "../labels.txt" }
instance_group { count: -1 }
version_policy { specific { versions: [ 1, 7 ] } }
"""
    write_model(tmp_path, "m", text)
    got = problems(tmp_path)
    places = [line.split(" ")[2].rstrip(":") for line in got]
    assert places == [f"m/config.pbtxt:{n}" for n in (4, 6, 13, 11, 3, 7, 7, 12)], got
    for said, line in zip(
        (
            "unknown field 'wrong_field' of ModelConfig",
            "'TYPE_INT33' is no DataType, did you mean 'TYPE_INT32'?",
            "warning: m: m/config.pbtxt:13: version_policy.specific.versions[1]: there is no folder of version 7",
            "output[0].label_filename: '../labels.txt' must stay within the model's folder",
            "max_batch_size: expected 0 (no batching) or more, got -3",
            "input[1].name: two inputs are called 'A'",
            "input[1].dims[0]: input 'A': a dimension is 1 or more, or -1 for any size, got 0",
            "instance_group[0].count: expected 1 or more instances, got -1",
        ),
        got,
        strict=True,
    ):
        assert said in line


@pytest.mark.slow
def test_json_configurations_have_lines_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", "")
    (folder / "config.pbtxt").unlink()
    (folder / "config.json").write_text(
        '{"backend": "identity",\n "maxBatchSize": "many",\n "input": [\n  {"name": "A",\n   "dims": [4]},\n'
        '  {"name": "B", "data_type": "TYPE_FP23", "dims": [4]}],\n "colour": 1}'
    )
    got = problems(tmp_path)
    assert [line.split(" ")[2] for line in got] == [f"m/config.json:{n}:" for n in (2, 6, 7, 4)], got
    assert "did you mean 'TYPE_FP" in got[1] and "must specify data_type" in got[3]
    (folder / "config.json").write_text('{"backend": "identity",\n nonsense')
    assert "m/config.json:2: not JSON" in problems(tmp_path)[0]


@pytest.mark.slow
def test_folders_versions_and_backends(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.pbtxt").write_text(identity_config())
    (tmp_path / "empty" / "v2").mkdir()
    (tmp_path / "empty" / "01").mkdir()
    write_model(tmp_path, "typo", 'backend: "onnxruntme"\n')
    write_model(tmp_path, "other", 'name: "another"\nbackend: "identity"\n')
    write_model(tmp_path, "policy", identity_config(extra="version_policy { specific { versions: 3 } }"))
    (tmp_path / "policy" / "config.json").write_text("{}")
    assert problems(tmp_path) == [
        "warning: empty: empty: '01' is no version number and is ignored; version 1 is a folder named 1",
        "warning: empty: empty: 'v2' is no version number and is ignored; version 2 is a folder named 2",
        f"error: empty: {tmp_path}/empty: model 'empty' has no version folder (a folder named 1, 2, ...)".replace(
            f"{tmp_path}/", ""
        ),
        "error: other: other/config.pbtxt:1: name: unexpected directory name 'other' for model 'another', directory "
        "name must equal model name",
        "warning: policy: policy/config.json: config.pbtxt counts, config.json beside it does not",
        "error: policy: policy/config.pbtxt:1: version_policy: no version is left by the version policy; there are 1",
        "error: typo: typo/config.pbtxt:1: backend: unable to find backend library for backend 'onnxruntme', try "
        "specifying runtime on the model configuration. (did you mean 'onnxruntime'? This server has "
        f"{', '.join(names())}; --backend-directory=DIR adds those in DIR/NAME, each a model.py or a libtriton_NAME.so)",
    ]


@pytest.mark.slow
def test_files_of_models(tmp_path: Path) -> None:
    onnx = onnx_models.add_sub()
    write_model(tmp_path, "missing", 'backend: "onnxruntime"')
    write_model(tmp_path, "damaged", 'backend: "onnxruntime"', {"1/model.onnx": onnx[: len(onnx) // 2]})
    write_model(
        tmp_path,
        "differs",
        'backend: "onnxruntime" max_batch_size: 8 input { name: "A" data_type: TYPE_FP32 dims: [ 16 ] }\n'
        'input { name: "B" data_type: TYPE_INT32 dims: [ 15 ] }\n'
        'output { name: "TOTAL" data_type: TYPE_INT32 dims: [ 16 ] }',
        {"1/model.onnx": onnx},
    )
    write_model(
        tmp_path, "syntax", PYTHON, {"1/model.py": "class TritonPythonModel:\n    def execute(self:\n"}
    )
    write_model(
        tmp_path, "classless", PYTHON, {"1/model.py": "import nosuchmodule, all\nX = 1\n", "all.py": ""}
    )
    write_model(tmp_path, "lazy", PYTHON, {"1/model.py": "\nclass TritonPythonModel:\n    pass\n"})
    labels = PYTHON.replace(
        'name: "Y" data_type: TYPE_FP32', 'name: "Y" label_filename: "l.txt" data_type: TYPE_FP32'
    )
    write_model(tmp_path, "labelled", labels, {"1/model.py": GOOD_MODEL, "l.txt": "a\nb\n"})
    write_model(
        tmp_path,
        "warm",
        PYTHON + 'model_warmup { name: "s" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 '
        'dims: [ 4 ] input_data_file: "x" } } }',
        {"1/model.py": GOOD_MODEL, "warmup/x": b"123"},
    )
    write_model(
        tmp_path,
        "state",
        PYTHON
        + "sequence_batching { state { input_name: 'I' output_name: 'O' data_type: TYPE_INT32 dims: [ 2 ]\n"
        "initial_state { name: 'i' data_type: TYPE_INT32 dims: [ 2 ] data_file: 'none' } } }",
        {"1/model.py": GOOD_MODEL},
    )
    got = problems(tmp_path)
    assert not any("No module named 'all'" in line for line in got), "it lies in the model's folder"
    for said in (
        "error: missing: missing/1: unable to find '",
        "error: damaged: damaged/1/model.onnx: not an ONNX model, or a damaged one",
        "error: differs: differs/config.pbtxt:1: input[0].name: version 1: unable to load model 'differs': unexpected "
        "datatype TYPE_FP32 for input 'A'",
        "error: differs: differs/config.pbtxt:2: input[1].name: version 1: unable to load model 'differs': input 'B' "
        "has the shape",
        "error: differs: differs/config.pbtxt:3: output[0].name: version 1: unable to load model 'differs': unexpected "
        "inference output 'TOTAL'",
        "error: syntax: syntax/1/model.py:2: ",
        "error: classless: classless/1/model.py: has no class TritonPythonModel",
        "error: classless: classless/1/model.py:1: No module named 'nosuchmodule' (the model runs with ",
        "error: lazy: lazy/1/model.py:2: class TritonPythonModel has no method execute",
        "warning: labelled: labelled/config.pbtxt:3: output[0].label_filename: 2 labels for the 4 elements",
        "error: warm: warm/config.pbtxt:4: model_warmup[0].inputs: warm-up input 'X' needs 16 bytes for its dims, 'x' has 3",
        "error: state: state/1: cannot read the initial state 'i' of state from",
    ):
        assert any(line.startswith(said) for line in got), (said, got)
    assert len(got) == 12, got


@pytest.mark.slow
def test_a_size_that_is_minus_one_in_a_file_is_any_size(tmp_path: Path) -> None:
    """Some converters write dim_value: -1, a varint of ten bytes."""
    write_model(tmp_path, "signed", "", {"1/model.onnx": onnx_models.identity(shape=(-1, 4))})
    status, text = check(str(tmp_path))
    assert status == 0 and text.startswith("1 model: 1 without errors; 0 errors, 0 warnings\n")
    assert onnx_signature.read(tmp_path / "signed/1/model.onnx").inputs[0].shape == [None, 4]


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """The server says the same, without a traceback."""
    name = os.fsdecode(b"lat\xe9")
    write_model(tmp_path, name, identity_config())
    write_model(tmp_path, "good", identity_config())
    told = "the name of this folder is not UTF-8, as names of models are: rename it"
    found = {model.name: model for model in Checker(Settings(model_repository=(tmp_path,))).all()}
    assert found["good"].ok and [told in str(problem) for problem in found[name].problems] == [True]
    with ServerProcess(tmp_path, "--exit-on-error=false", failures=told) as server:
        assert "Traceback" not in server.log()


def test_a_fault_of_one_model_s_check_does_not_end_that_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write_model(tmp_path, name, identity_config())
    whole = Checker._folder

    def broken(self: Checker, checked: Any, folder: Path) -> None:
        if checked.name == "b":
            raise OverflowError("what nobody thought of")
        whole(self, checked, folder)

    monkeypatch.setattr(Checker, "_folder", broken)
    found = Checker(Settings(model_repository=(tmp_path,))).all()
    assert [(model.name, model.ok) for model in found] == [("a", True), ("b", False), ("c", True)]
    assert "its check failed, which is a fault of neptrio: OverflowError: what nobody" in str(
        found[1].problems[0]
    )


@pytest.mark.slow
def test_ensembles(tmp_path: Path) -> None:
    write_model(tmp_path, "first", identity_config())
    write_model(tmp_path, "second", identity_config(datatype="TYPE_FP32"))
    write_model(tmp_path, "ens", ENSEMBLE)
    write_model(tmp_path, "lost", ENSEMBLE.replace('"second"', '"secnd"'))
    for name, other in (("a", "b"), ("b", "a")):
        step = f'{{ model_name: "{other}" model_version: -1 input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }}'
        write_model(
            tmp_path,
            name,
            'platform: "ensemble" input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "Y" data_type: '
            f"TYPE_INT32 dims: [ 1 ] }}\nensemble_scheduling {{ step [\n{step} ] }}",
        )
    got = problems(tmp_path)
    assert any("ens/config.pbtxt:" in line and "TYPE_FP32" in line and "tensor" in line for line in got), got
    assert any("model 'secnd' is in no repository, did you mean 'second'?" in line for line in got), got
    assert any(
        "b/config.pbtxt:3" in line and "ensembles contain each other: a -> b -> a" in line for line in got
    )
    assert any("a/config.pbtxt:3" in line and "model 'b' has errors of its own" in line for line in got), got


@pytest.mark.slow
def test_exit_statuses(tmp_path: Path) -> None:
    assert check(str(tmp_path / "none"))[0] == 2
    assert check()[0] == 2
    assert check(str(tmp_path), "--nosuch")[0] == 2
    write_model(tmp_path, "m", identity_config())
    (tmp_path / "m" / "config.json").write_text("{}")
    assert check(str(tmp_path))[0] == 0, "a warning"
    assert check(str(tmp_path), "--strict")[0] == 1
    assert check(str(tmp_path), "--model", "n")[0] == 1
    (tmp_path / "other" / "m").mkdir(parents=True)
    assert "appears in two or more repositories" in check(str(tmp_path), str(tmp_path / "other"))[1]


@pytest.mark.slow
def test_links_that_lead_out(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (tmp_path / "secret").write_text("x")
    write_model(repository, "m", identity_config())
    write_model(repository, "n", identity_config())
    os.symlink(repository / "n" / "config.pbtxt", repository / "m" / "fine")
    binaries = repository / "m" / "env" / "bin"  # of a virtual environment, as Python 3.14 makes one
    binaries.mkdir(parents=True)
    (binaries.parent / "pyvenv.cfg").touch()
    for name in ("python", "python3.14", "\N{MATHEMATICAL ITALIC SMALL PI}thon"):
        os.symlink(tmp_path / "secret", binaries / name)
    assert problems(repository) == []
    os.symlink(tmp_path / "secret", repository / "m" / "1" / "weights")
    got = problems(repository)
    assert got[0].startswith("error: m: m/1/weights: the symbolic link leads out of the repository, to /")
    assert problems(repository, "--follow-external-links") == []


# ------------------------------------------------------------------------------ a live server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "first", identity_config())
    write_model(repository, "second", identity_config())
    write_model(repository, "ens", ENSEMBLE)
    write_model(repository, "idle", identity_config())
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=ens") as process:
        yield process


def checked(server: ServerProcess, name: str, body: Any = b"") -> Any:
    reply = post(server, f"models/{name}/check", body)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def test_a_live_check_shows_the_difference_and_changes_nothing(server: ServerProcess) -> None:
    plain = checked(server, "first")
    assert plain["ok"] and plain["problems"] == plain["changes"] == [] and plain["load_would"] == "nothing"
    assert checked(server, "idle")["load_would"] == "load"
    config = {**CONFIG, "max_batch_size": 4, "instance_group": [{"count": 2, "kind": "KIND_CPU"}]}
    for body in ({"parameters": {"config": json.dumps(config)}}, {"config": config}):
        answer = checked(server, "first", body)
        assert answer["load_would"] == "reload" and answer["running_version"] == "1"
        assert {"field": "max_batch_size", "running": 8, "checked": 4} in answer["changes"]
        assert {"field": "instance_group[0].count", "running": 1, "checked": 2} in answer["changes"]
        name = {"field": "instance_group[0].name", "running": "first", "checked": "first_0"}
        assert name in answer["changes"]  # groups that are given are numbered
        assert len(answer["changes"]) == 3, answer
    groups = {**CONFIG, "instance_group": [{"count": 2, "kind": "KIND_CPU"}]}
    assert checked(server, "first", {"config": groups})["load_would"] == "update"
    bad = {**CONFIG, "max_batch_size": -1, "backend": "nosuch"}
    answer = checked(server, "first", {"config": bad})
    assert not answer["ok"] and answer["load_would"] == "fail"
    assert {p["field"] for p in answer["problems"]} == {"max_batch_size", "backend"}
    assert answer["problems"][0]["line"] == 1
    other = {**CONFIG, "output": [{"name": "O", "data_type": "TYPE_INT32", "dims": [16]}]}
    answer = checked(server, "first", {"config": other})
    assert answer["ok"] and "the ensemble 'ens', which serves, would not load again" in str(
        answer["problems"]
    )
    assert checked(server, "first")["load_would"] == "nothing"


def test_a_live_check_of_files(server: ServerProcess) -> None:
    onnx = base64.b64encode(onnx_models.add_sub()).decode()
    config = json.dumps({"backend": "onnxruntime"})
    answer = checked(server, "new", {"parameters": {"config": config, "file:3/model.onnx": onnx}})
    assert answer["ok"] and answer["versions"] == ["3"] and answer["load_would"] == "load"
    damaged = base64.b64encode(b"nonsense").decode()
    answer = checked(server, "new", {"parameters": {"config": config, "file:3/model.onnx": damaged}})
    assert not answer["ok"] and "not an ONNX model" in answer["problems"][0]["message"]


def test_a_live_check_refuses_what_a_load_refuses(server: ServerProcess) -> None:
    assert "'nope' is not found" in refused(post(server, "models/nope/check"), 404)
    assert "not valid base64" in refused(
        post(server, "models/first/check", {"parameters": {"config": "{}", "file:1/x": "*"}}), 400
    )
    refused(post(server, "models/first/check", b"{"), 400)
    assert refused(load(server, "nope"), 500)
