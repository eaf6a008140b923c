"""--model-name: repositories that are the folder of one model, as KServe mounts it at /mnt/models."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.repository.cloud import CloudRepository
from neptrio.repository.single_model import is_model
from tests.repository.test_check import check
from tests.support import onnx_models
from tests.support.control import infer, load, rows
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1, 16]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [1, 16]})
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy() * 2)]) for r in requests
        ]
"""


def test_a_model_with_versions_is_served_under_the_given_name(tmp_path: Path) -> None:
    mounted = write_model(tmp_path, "models", 'name: "trained" ' + identity_config(), versions=(1, 3))
    flags = ("--model-name=service", "--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(mounted, *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert rows(client, "service") == [("3", "READY", "")]
            assert client.get_model_metadata("service")["name"] == "service"
            infer(client, "service")
            assert load(server, "service").status == 200
            # what is added to the mounted folder later is seen
            (mounted / "4").mkdir()
            assert load(server, "service").status == 200
            assert ("4", "READY", "") in rows(client, "service")
        with grpcclient.InferenceServerClient(server.grpc) as client:
            infer(client, "service")
        assert "trained" not in server.log()


@pytest.mark.slow
def test_the_files_alone_are_a_model(tmp_path: Path) -> None:
    python, onnx = tmp_path / "python", tmp_path / "onnx"
    python.mkdir()
    (python / "model.py").write_text(PYTHON)
    onnx.mkdir()
    (onnx / "model.onnx").write_bytes(onnx_models.add_sub())
    (onnx / "config.pbtxt").write_text('backend: "onnxruntime"')
    with ServerProcess(python, "--model-name=doubled") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert infer(client, "doubled", ("INPUT0",)).as_numpy("OUTPUT0").tolist() == [[2] * 16]
    with ServerProcess(onnx, "--model-name=sums") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert infer(client, "sums", ("A", "B")).as_numpy("SUM").tolist() == [[2] * 16]


def test_links_of_a_mounted_claim(tmp_path: Path) -> None:
    """KServe's storage initialiser links files of a pvc:// URI one by one into /mnt/models."""
    claim = write_model(tmp_path / "pvc", "m", identity_config())
    mounted = tmp_path / "models"
    mounted.mkdir()
    for entry in claim.iterdir():
        (mounted / entry.name).symlink_to(entry)
    with ServerProcess(mounted, "--model-name=m", "--follow-external-links=true") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            infer(client, "m")
    with pytest.raises(AssertionError, match="leads out of the repository"):
        ServerProcess(mounted, "--model-name=m")


def test_a_repository_stays_one(tmp_path: Path) -> None:
    write_model(tmp_path, "a", identity_config())
    write_model(tmp_path, "7", identity_config())
    with ServerProcess(tmp_path, "--model-name=service") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert {row["name"] for row in client.get_model_repository_index()} == {"7", "a"}
            infer(client, "7")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), False),
        (("m/config.pbtxt",), False),
        (("7/config.pbtxt",), False),
        (("7/1/model.py",), False),
        (("config.pbtxt",), True),
        (("1/model.onnx",), True),
        (("model.onnx",), True),
        (("README.md", "m/1/model.py"), False),
    ],
)
def test_what_a_model_is_told_by(files: tuple[str, ...], expected: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert is_model(tmp_path) is expected
    assert not is_model(tmp_path / "missing")


def test_a_model_in_cloud_storage(tmp_path: Path) -> None:
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]
    try:
        storage.pipe_file("/box/one/config.pbtxt", b"one")
        storage.pipe_file("/box/one/2/weights", b"w")
        storage.pipe_file("/box/bare/1/weights", b"w")
        for url in ("memory://box/one", "memory://box/bare"):
            repository = CloudRepository(url, tmp_path, "service")
            repository.refresh()
            assert list(repository.model_dirs()) == ["service"] and repository.is_model
            repository.localise("service")
            assert list(repository.model_dirs()["service"].rglob("weights"))
        plain = CloudRepository("memory://box", tmp_path, "service")
        plain.refresh()
        assert list(plain.model_dirs()) == ["bare", "one"] and not plain.is_model
    finally:
        storage.store.clear()
        storage.pseudo_dirs[:] = [""]


@pytest.mark.slow
def test_check_takes_the_name_too(tmp_path: Path) -> None:
    mounted = write_model(tmp_path, "models", 'name: "trained" ' + identity_config())
    status, text = check(str(mounted), "--model-name=service")
    assert status == 0 and "1 model: 1 without errors" in text


@pytest.mark.slow
def test_a_folder_too_high_or_too_low_is_said(tmp_path: Path) -> None:
    """By the check, as by the start, which asks the same module."""
    inner = tmp_path / "models"
    write_model(inner, "m", "", {"1/model.onnx": onnx_models.identity()})
    status, text = check(str(inner / "m"))
    assert status == 1
    assert (
        "'m' is itself a model's folder: serve the folder that it is in, or this one alone with --model-name=m"
        in text
    )
    assert "move it to" not in text
    status, text = check(str(tmp_path))
    assert status == 1
    assert "'models' is itself a folder of models ('m'): serve it, and not the folder that it is in" in text
    for place, said in ((tmp_path, "'models' is itself"), (inner / "m", "'m' is itself a model's folder")):
        with ServerProcess(place, "--exit-on-error=false") as server:
            assert said in " ".join(server.log().replace("|", " ").split())
    (tmp_path / "empty").mkdir()
    with ServerProcess(tmp_path / "empty") as server:
        server.until_logged(f"no models: there is no folder of a model in {tmp_path}/empty")


@pytest.mark.slow
def test_errors_name_the_folder_that_was_given(tmp_path: Path) -> None:
    mounted = write_model(tmp_path, "models", "oops")
    expected = f"{mounted}/config.pbtxt:1: unknown field 'oops'"
    for more in ((), ("--json",)):
        status, text = check(str(mounted), "--model-name=service", *more)
        assert status == 1 and str(mounted) in text and "neptrio-single" not in text
    with pytest.raises(AssertionError) as failed:
        ServerProcess(mounted, "--model-name=service")
    assert expected in str(failed.value) and "neptrio-single" not in str(failed.value)
