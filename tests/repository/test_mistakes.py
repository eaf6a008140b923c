"""What people get wrong in a model's folder: the start, the load verb and `neptrio check` say the same, and what to do."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio import cli
from tests.support import onnx_models
from tests.support.control import infer, load
from tests.support.repository import write_model
from tests.support.server import ServerProcess

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        pass\n"
IO = "".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }} '
    for kind, name in (("input", "INPUT0"), ("output", "OUTPUT0"))
)
POINTER = "version https://git-lfs.github.com/" + "spec" + "/v1\noid sha256:aa\nsize 12\n"


def archive() -> bytes:
    """What torch.save() writes begins like this."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", b"")
    return file.getvalue()


# model -> (its files, what is said of it)
WRONG = {
    "loose": (
        {"model.onnx": onnx_models.identity()},
        "'model.onnx' is not read, it lies beside the version folders: move it to '1/model.onnx'",
    ),
    "beside": (
        {"model.py": MODEL, "1/notes.txt": ""},
        "'model.py' is not read, it lies beside the version folders: move it to '1/model.py'",
    ),
    "weights": (
        {"1/weights.onnx": onnx_models.identity()},
        "'1/weights.onnx' is not read: call it model.onnx, or name it in default_model_filename",
    ),
    "letters": ({"Config.pbtxt": 'backend: "identity"', "1/notes.txt": ""}, "'Config.pbtxt' is not read"),
    "pointer": ({"1/model.onnx": POINTER}, "this is a Git LFS pointer and not the model: run `git lfs pull`"),
    "archive": (
        {"1/model.onnx": archive()},
        "this is an archive, as torch.save() makes it, and no ONNX model",
    ),
    "versions": (
        {"v1/model.py": MODEL},
        "'v1' is no version number and is ignored; version 1 is a folder named 1",
    ),
    "file": ({"1": MODEL}, "'1' is a file: version 1 is a folder of that name, with the model in it"),
    "backend": (
        {"config.pbtxt": f'{IO}\nbackend: "mxnet"', "1/notes.txt": ""},
        "unable to find backend library for backend 'mxnet', try specifying runtime on the model configuration. (This "
        "server has ",
    ),
    "damaged": (
        {"1/model.onnx": onnx_models.identity()[:-20]},
        "not an ONNX model, or a damaged one: ",
    ),
}

# model -> where its configuration lies, which nobody reads
CONFIGS = {"capitals": "Config.pbtxt", "misspelt": "config.pbtext", "deep": "1/config.pbtxt"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, (files, _) in WRONG.items():
        for file, content in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    write_model(
        folder, "absent", f'backend: "python" {IO}', {"1/model.py": f"import nowhere_to_be_found\n{MODEL}"}
    )
    write_model(
        folder, "reads_its_own", f'backend: "python" {IO}', {"1/model.py": MODEL, "1/weights.onnx": b"x"}
    )
    for name, config in CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / config).write_text("max_batch_size: 4")
        (folder / name / "1/model.onnx").write_bytes(onnx_models.identity())
    (folder / "loose.onnx").write_bytes(onnx_models.identity())
    write_model(folder, "trees", 'backend: "fil"', {"1/model.txt": POINTER})
    misspelt = 'parameters { key: "isolatoin" value { string_value: "none" } }'
    write_model(folder, "doubtful", f'backend: "identity" {IO} dynamic_batching {{ }} {misspelt}')
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    flags = ("--exit-on-error=false", "--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(repository, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def checked(repository: Path) -> str:
    command = [sys.executable, "-m", "neptrio", "check", str(repository)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_the_start_a_load_and_the_check_say_the_same(server: ServerProcess, checked: str, name: str) -> None:
    text = WRONG[name][1]
    server.until_logged(text)
    assert text in load(server, name).body.decode().replace("\\u0060", "`")
    assert any(f": {name}: " in line and text in line for line in checked.splitlines())


@pytest.mark.slow
def test_a_pointer_of_git_lfs_is_named_for_every_backend(server: ServerProcess, checked: str) -> None:
    said = "1/model.txt is a Git LFS pointer and not the file: run `git lfs pull` where the repository was cloned"
    reply = load(server, "trees").body.decode().replace("\\u0060", "`")
    assert "model.txt cannot be read as lightgbm" in reply and said in reply and said in server.log()
    assert any(": trees: " in line and said in line for line in checked.splitlines())


@pytest.mark.slow
def test_a_missing_package_names_the_interpreter_and_the_ways_out(
    server: ServerProcess, checked: str
) -> None:
    """In the same words wherever it is said."""
    said = (
        f"No module named 'nowhere_to_be_found' (the model runs with {sys.executable}: install the package there, or "
        "give the model an environment of its own with the parameter EXECUTION_ENV_PATH)"
    )
    assert said in server.log() and said in load(server, "absent").body.decode()
    assert f"absent/1/model.py:1: {said}" in checked


@pytest.mark.slow
def test_what_has_no_effect_is_said(server: ServerProcess, checked: str) -> None:
    for said in (
        "batches nothing: max_batch_size is 0",
        "'isolatoin' is no parameter of this server, did you mean 'isolation'?",
        "capitals: 'Config.pbtxt' is not read: its name must be config.pbtxt, in lower case",
        "misspelt: 'config.pbtext' is not read: its name must be config.pbtxt",
        "deep: '1/config.pbtxt' is not read: move it to 'config.pbtxt', beside the version folders",
        "'loose.onnx' is not read, it lies beside the models' folders: move it to 'loose/1/model.onnx'",
    ):
        assert said in server.log() and said in checked
    assert "reads_its_own: " not in checked, "a model in Python may have weights beside it"


@pytest.mark.slow
def test_the_line_that_asks_for_a_backend_is_named(
    server: ServerProcess, repository: Path, checked: str
) -> None:
    at = f"{repository}/backend/config.pbtxt:2: backend"
    assert f"{at}: unable to find backend library" in checked
    for said in (server.log(), load(server, "backend").body.decode()):
        assert f"a libtriton_NAME.so) ({at})" in said


@pytest.mark.slow
def test_a_model_that_failed_is_not_just_unknown(server: ServerProcess) -> None:
    with (
        httpclient.InferenceServerClient(server.http) as client,
        pytest.raises(
            InferenceServerException, match=r"'absent' has no available versions; it failed to load, the log"
        ) as info,
    ):
        infer(client, "absent")
    assert info.value.status() == "404"


def test_a_folder_that_is_none_of_models_is_told_from_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's folder, one of its versions, and nothing at all."""
    for files in ("m/config.pbtxt", "m/model.py", "n/1/model.py", "empty/README.md"):
        path = tmp_path / files
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODEL if path.suffix == ".py" else "")
    itself = (
        "is itself a model's folder: serve the folder that it is in, or this one alone with --model-name="
    )
    for place, text in (("m", f"'m' {itself}m"), ("n/1", f"'n' {itself}n"), ("empty", "")):
        assert cli.main(["check", str(tmp_path / place)]) == 0
        out = capsys.readouterr().out
        assert text in out and f"no models: there is no folder of a model in {tmp_path / place}\n" in out
