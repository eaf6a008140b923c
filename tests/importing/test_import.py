"""`neptrio import`: from a model's file to a folder that serves, and what is said of files that cannot be."""

from __future__ import annotations

import json
import pickle
import shlex
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neptrio import commands
from neptrio.importing import formats
from tests.backends.fil import ensembles
from tests.support import onnx_models
from tests.support.http import Http1
from tests.support.server import ServerProcess

pytestmark = pytest.mark.slow

PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())]) for r in requests]
"""


def imported(*arguments: object) -> int:
    """The exit status of `neptrio import`."""
    return commands.run("import", [str(argument) for argument in arguments])


@pytest.mark.filterwarnings("ignore")  # of the library that trains
def test_files_become_folders_that_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, repository = tmp_path / "files", tmp_path / "new" / "models"
    (files / "folder").mkdir(parents=True)
    trees = ensembles.xgboost("binary:logistic", ensembles.TWO, rows=ensembles.WHOLE)(files)
    trees.path.rename(files / "churn rate.ubj")
    (files / "sums.onnx").write_bytes(onnx_models.add_sub())
    (files / "folder/echo.py").write_text(PYTHON)
    (files / "folder/helper.txt").write_text("beside")
    assert imported(files / "churn rate.ubj", "--repository", repository) == 0
    said = capsys.readouterr().out
    assert f"{repository}/churn_rate: XGBoost's trees, served by backend 'fil'" in said
    assert "input   input__0  FP32 [-1, 8]" in said and "not known" not in said
    assert imported(files / "sums.onnx", "--repository", repository, "--name", "other") == 0
    assert imported(files / "folder", "--repository", repository, "--name", "echo") == 0
    said = capsys.readouterr().out
    assert "not known: input IN has dims [-1]: 1 was taken for each -1" in said
    assert "not known: whether requests may be joined" in said
    assert (repository / "echo/1/helper.txt").read_text() == "beside"
    assert sorted(path.name for path in repository.iterdir()) == ["churn_rate", "echo", "other"]
    flags = ("--disable-auto-complete-config",)  # what was found stands in the configurations
    with ServerProcess(repository, *flags) as server, Http1(server.http) as http:
        for name in ("churn_rate", "other", "echo"):
            body = (repository / name / "request.json").read_bytes()
            reply = http.request("POST", f"/v2/models/{name}/infer", body)
            assert reply.status == 200, reply.body
        asked = {
            "name": "input__0",
            "datatype": "FP32",
            "shape": [300, 8],
            "data": trees.rows.ravel().tolist(),
        }
        reply = http.request("POST", "/v2/models/churn_rate/infer", json.dumps({"inputs": [asked]}).encode())
        found = json.loads(reply.body)["outputs"][0]["data"]
        np.testing.assert_allclose(found, trees.expected, 1e-6, 1e-6)


def test_weights_beside_an_onnx_file_are_taken_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = numpy_helper.from_array(np.full((4,), 3, np.float32), "W")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "XY"]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["X", "W"], ["Y"])], "g", ends[:1], ends[1:], [weights]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(
        model, tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0
    )
    assert imported(tmp_path / "net.onnx", "--repository", tmp_path / "models") == 0
    assert (tmp_path / "models/net/1/net.bin").read_bytes() == (tmp_path / "net.bin").read_bytes()
    (tmp_path / "net.bin").unlink()
    capsys.readouterr()
    assert imported(tmp_path / "net.onnx", "--repository", tmp_path / "again") == 2
    assert "net.bin, which is not there" in capsys.readouterr().err
    content = (tmp_path / "net.onnx").read_bytes()
    (tmp_path / "net.onnx").write_bytes(content.replace(b"net.bin", b"../.bin"))
    assert imported(tmp_path / "net.onnx", "--repository", tmp_path / "again") == 2
    assert "wants weights from '../.bin', outside its folder" in capsys.readouterr().err


def test_a_model_that_loads_and_does_not_answer_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "picky.py").write_text(PYTHON.replace("requests]", "request]"))
    assert imported(tmp_path / "picky.py", "--repository", tmp_path / "models") == 1
    assert "it loads, and the test request (zeros) was refused: " in capsys.readouterr().out
    assert (tmp_path / "models/picky/config.pbtxt").exists()


def test_what_is_said_to_type_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a shell, whatever the names are."""
    repository = tmp_path / "my models; é"
    (tmp_path / "sums.onnx").write_bytes(onnx_models.add_sub())
    assert imported(tmp_path / "sums.onnx", "--repository", repository, "--name", "a+sum&(more)") == 0
    said = dict(line.split(":  ", 1) for line in capsys.readouterr().out.splitlines() if " it:  " in line)
    assert shlex.split(said["serve it"]) == ["neptrio", f"--model-repository={repository}"]
    curl, flag, file, url = shlex.split(said["ask it"])
    assert (curl, flag, url) == ("curl", "-d", "localhost:8000/v2/models/a+sum&(more)/infer")
    with ServerProcess(repository) as server, Http1(server.http) as http:
        reply = http.request("POST", url.removeprefix("localhost:8000"), Path(file[1:]).read_bytes())
        assert reply.status == 200, reply.body


def test_no_command_is_named_that_cannot_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.onnx").write_bytes(onnx_models.identity("FP16"))
    assert imported(tmp_path / "half.onnx", "--repository", tmp_path / "models") == 0
    assert not (tmp_path / "models/half/request.json").exists()
    said = capsys.readouterr().out
    assert "ask it:    with a client that sends binary tensors" in said and "curl" not in said
    (tmp_path / "sums.onnx").write_bytes(onnx_models.add_sub())
    assert imported(tmp_path / "sums.onnx", "--repository", tmp_path / "models", "--name", "a sum") == 0
    said = capsys.readouterr().out
    assert "ask it:    over gRPC, since a path of HTTP cannot carry the name" in said and "curl" not in said


@pytest.mark.parametrize("where", ["s3://bucket/models", ""])
def test_a_repository_that_is_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.onnx").write_bytes(onnx_models.add_sub())
    for command in (["import", "sums.onnx", "--repository"], ["explain", "sums", "--model-repository"]):
        with pytest.raises(SystemExit) as end:
            commands.run(command[0], [*command[1:], where])
        assert end.value.code == 2
        assert "expected a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sums.onnx"]


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path) -> str:
    """What is said of a file that is not imported; nothing is left in the repository."""
    assert imported(source, "--repository", tmp_path / "models") == 2
    assert not [path for path in (tmp_path / "models").glob("*") if path.name != "taken"]
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    return text


def test_what_is_not_imported_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "forest.pkl": pickle.dumps([1]), "forest.bin": pickle.dumps([1]), "notes.md": b"# notes", "empty.json": b"{}",
        "net.plan": b"x", "broken.onnx": b"x", "broken.tl": b"x", "none.py": b"print()",
        "broken.py": b"class TritonPythonModel:\n    pass\n",
        "saved/saved_model.pb": b"x", "several/a.tl": b"x", "several/b.tl": b"x", "nothing/readme": b"x",
        "pickles/model.pkl": b"x",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said = {name: refused(tmp_path, capsys, tmp_path / name) for name in files if "/" not in name}
    for folder in ("saved", "several", "nothing", "pickles", "missing"):
        said[folder] = refused(tmp_path, capsys, tmp_path / folder)
    for name in ("forest.pkl", "forest.bin", "pickles"):
        assert "is a pickle, and reading one runs whatever code is in it" in said[name]
    for name in ("notes.md", "empty.json", "none.py"):
        assert "is no model that is known here: ONNX" in said[name]
    assert "backend 'tensorrt' is not part of this server" in said["net.plan"]
    assert "backend 'tensorflow' is not part of this server" in said["saved"]
    assert f"{tmp_path}/broken.tl cannot be read as treelite_checkpoint" in said["broken.tl"]
    assert "has no method execute" in said["broken.py"]
    assert "broken.onnx" in said["broken.onnx"] and "No such file" in said["missing"]
    assert "holds several models: a.tl, b.tl; name the file that is meant" in said["several"]
    assert "holds no model's file that is known here" in said["nothing"]


def test_another_backend_must_serve_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.onnx").write_bytes(onnx_models.add_sub())
    assert imported(tmp_path / "net.onnx", "--repository", tmp_path / "models", "--backend", "fil") == 2
    said = capsys.readouterr().err
    assert "an ONNX model is served by onnxruntime or openvino, not by 'fil'" in said


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models/taken").mkdir(parents=True)
    (tmp_path / "taken.onnx").write_bytes(onnx_models.add_sub())
    assert "is there already" in refused(tmp_path, capsys, tmp_path / "taken.onnx")
    assert list((tmp_path / "models/taken").iterdir()) == []


def test_a_folder_of_a_hugging_face_model_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(**files: object) -> Path:
        for name, content in files.items():
            (tmp_path / ".".join(name.rsplit("__", 1))).write_text(json.dumps(content))
        return tmp_path

    folder = written(config__json={"architectures": ["BertForMaskedLM"]}, model__safetensors=0, model__onnx=0)
    assert formats.inside(folder)[1].sample == b"text"
    written(tokenizer_config__json={"mask_token": {"content": "<mask>"}})
    file, kind = formats.inside(folder)
    assert (file.name, kind.backend, kind.sample) == ("config.json", "transformers", b"text <mask>")
    assert "*.onnx" in kind.left and "*.json" not in kind.left
    assert formats.inside(written(preprocessor_config__json={}))[1].sample == formats.PIXEL
    json.dumps(formats.PIXEL.decode())  # a request in JSON can hold it
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert formats.inside(folder)[1].left == ()  # so that the backend sees what it refuses
    (tmp_path / "model.onnx").write_bytes(onnx_models.add_sub())
    (tmp_path / "pytorch_model.bin").unlink()
    assert formats.inside(folder)[1].backend == "onnxruntime"


@pytest.mark.skipif(find_spec("transformers") is not None, reason="it is installed: make test-backends")
def test_a_folder_whose_backend_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "net" / name).write_text("{}")
    assert "pip install 'torch>=2.4' 'transformers" in refused(tmp_path, capsys, tmp_path / "net")
