"""Environments in archives: unpacked once, and nothing outside of their folder is touched."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import threading
import venv
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.python.environment import COMPLETE, cache_directory, environment_python
from neptrio.errors import InvalidArgument
from tests.backends.python.models import config, python_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

MODEL = """
import sys
import numpy as np

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        c.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
        return c

    def execute(self, requests):
        import only_here
        answer = np.array([sys.prefix, only_here.VALUE], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]) for _ in requests]
"""


def interpreter(path: str, model_dir: Path, cache: Path) -> str:
    """That of a model without a user or limits."""
    return environment_python(path, model_dir, cache, dict(os.environ), {})


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain virtual environment's layout as tar.gz: lib64 is a link, bin/python one that leads out."""
    folder = tmp_path_factory.mktemp("environment")
    made = folder / "env"
    venv.create(made, with_pip=False, symlinks=True)
    site = made / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "only_here.py").write_text("VALUE = 'found'\n")
    (site / "numpy.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    assert not (made / "bin/python").resolve().is_relative_to(folder)
    path = folder / "env.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for entry in sorted(made.iterdir()):
            tar.add(entry, entry.name)
    shutil.rmtree(made)
    return path


def models(repository: Path, archive: Path | str) -> None:
    parameter = f' parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{archive}" }} }}'
    for name in ("one", "two"):
        python_model(repository, name, MODEL, f'backend: "python" name: "{name}"' + parameter)


def prefix(server: ServerProcess, model: str) -> Path:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        found = client.infer(model, [tensor]).as_numpy("OUT")
    assert found[1] == b"found"
    return Path(found[0].decode())


@pytest.mark.slow
def test_models_run_in_an_archived_environment(tmp_path: Path, archive: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    models(repository, archive)
    flag = f"--backend-config=python,environment-cache-directory={cache}"
    with ServerProcess(repository, flag) as server:
        folder = prefix(server, "one")
        assert folder == prefix(server, "two")
        assert folder.parent == cache and len(folder.name) == 64
        assert server.log().count("unpacking '") == 1
    with ServerProcess(repository, flag) as server:
        assert prefix(server, "one") == folder
        assert "unpacking '" not in server.log()


def test_content_decides(tmp_path: Path, archive: Path) -> None:
    cache = tmp_path / "cache"
    copy = tmp_path / "copy.tgz"
    shutil.copy(archive, copy)
    first = interpreter(str(archive), tmp_path, cache)
    assert interpreter("$$TRITON_MODEL_DIRECTORY/copy.tgz", tmp_path, cache) == first
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [Path(first).parent.parent.name]
    with tarfile.open(copy, "w:gz") as tar:  # a folder in front of it all
        tar.add(Path(first).parent.parent, "env")
    second = interpreter(str(copy), tmp_path, cache)
    assert second != first and second.endswith("/env/bin/python")


def test_an_interrupted_unpacking_is_done_again(tmp_path: Path, archive: Path) -> None:
    python = Path(interpreter(str(archive), tmp_path, tmp_path))
    folder = python.parent.parent
    (folder / COMPLETE).unlink()
    (folder / "left").touch()
    assert interpreter(str(archive), tmp_path, tmp_path) == str(python)
    assert not (folder / "left").exists() and (folder / COMPLETE).exists()


def test_many_at_once_unpack_once(tmp_path: Path, archive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "neptrio.python")
    found: list[str] = []
    ask = lambda: found.append(interpreter(str(archive), tmp_path, tmp_path))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    assert caplog.text.count("unpacking") == 1


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"x") -> tuple:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o755
    made.size = len(data) if kind == tarfile.REGTYPE else 0
    return made, data


PYTHON = member("bin/python", tarfile.SYMTYPE, sys.executable)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([member("../out")], "'../out' leads out of the environment"),
        ([member("a/../../out")], "leads out"),
        ([member("/tmp/out")], "leads out"),
        ([member("lib", tarfile.SYMTYPE, "/etc")], "links to '/etc', outside"),
        ([member("lib", tarfile.SYMTYPE, "../..")], "links to '../..', outside"),
        ([member("a/b", tarfile.SYMTYPE, "../../out")], "outside"),
        ([member("hard", tarfile.LNKTYPE, "/etc/passwd")], "links to '/etc/passwd', outside"),
        ([member("hard", tarfile.LNKTYPE, "../../etc/passwd")], "outside"),
        ([member("bin/pythonx", tarfile.SYMTYPE, "/"), member("bin/pythonx/out")], "through a link"),
        ([member("bin/pythonx", tarfile.SYMTYPE, "/out"), member("bin/pythonx")], "through a link"),
        ([member("bin/pythonx", tarfile.SYMTYPE, "/"), member("./bin/./pythonx/out")], "through a link"),
        (
            [
                member("bin/pythonx", tarfile.SYMTYPE, "/"),
                member("h", tarfile.LNKTYPE, "bin/pythonx/etc/passwd"),
            ],
            "links through a link",
        ),
        ([member("pipe", tarfile.FIFOTYPE)], "neither a file, a folder nor a link"),
        ([member("null", tarfile.CHRTYPE)], "neither a file"),
    ],
)
def test_members_that_lead_out(tmp_path: Path, members: list[tuple], text: str) -> None:
    path, cache = tmp_path / "evil.tar.gz", tmp_path / "inner" / "cache"
    with tarfile.open(path, "w:gz") as tar:
        for made, data in [PYTHON, *members]:
            tar.addfile(made, io.BytesIO(data))
    with pytest.raises(InvalidArgument, match="member '") as info:
        interpreter(str(path), tmp_path, cache)
    assert text in str(info.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.tar.gz", "inner"]
    assert [p.suffix for p in cache.iterdir()] == [".lock"]  # nothing of it stays


def test_modes(tmp_path: Path) -> None:
    made = member("bin/tool")
    made[0].mode = 0o6777
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for entry, data in (PYTHON, made, member("bin/data.txt")):
            tar.addfile(entry, io.BytesIO(data))
    python = Path(interpreter(str(tmp_path / "a.tar.gz"), tmp_path, tmp_path / "cache"))
    assert (python.parent / "tool").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no archive", "cannot be unpacked"),
        (b"", "cannot be unpacked"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "cannot be unpacked"),
    ],
)
def test_files_that_are_no_archive(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "env.tar.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=text):
        interpreter(str(path), tmp_path, tmp_path / "cache")


def test_an_archive_without_python_or_cut_off(tmp_path: Path, archive: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.addfile(member("lib/x")[0], io.BytesIO(b"x"))
    with pytest.raises(InvalidArgument, match="the archive has no bin/python"):
        interpreter(str(tmp_path / "a.tar.gz"), tmp_path, tmp_path / "cache")
    whole = archive.read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="cannot be unpacked"):
        interpreter(str(tmp_path / "cut.tar.gz"), tmp_path, tmp_path / "cache")


def test_a_model_says_what_is_wrong_with_its_archive(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    models(repository, "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    (repository / "one" / "env.tar.gz").write_text("no archive")
    with ServerProcess(repository, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert "cannot be unpacked" in rows["one"]["reason"]
    assert "does not exist" in rows["two"]["reason"]


@pytest.mark.slow
def test_an_environment_without_numpy_says_what_to_install(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    models(repository, "$$TRITON_MODEL_DIRECTORY/env")
    python = repository / "one/env/bin/python"
    venv.create(repository / "one/env", with_pip=False, symlinks=True)
    with ServerProcess(repository, "--exit-on-error=false") as server:
        server.until_logged(
            f"No module named 'numpy' (the model runs with {python}, which needs it: {python} -m pip install numpy)"
        )


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory({"environment-cache-directory": "/a/b"}) == Path("/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_directory({}) == Path("/cache/neptrio/environments")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/nowhere/x")
    assert cache_directory({}) == Path("/nowhere/x/.cache/neptrio/environments")


PLACEHOLDER = "/opt/the_prefix_of_the_build_that_is_replaced"
CONDA_UNPACK = f"""#!/usr/bin/env python
import pathlib, sys

root = pathlib.Path(__file__).resolve().parent.parent
if (root / "refuse").exists():
    sys.exit("no prefix here")
with (root / "runs").open("a") as runs:
    runs.write(sys.prefix + "\\n")
for path in root.glob("lib/python*/site-packages/only_here.py"):
    path.write_text(path.read_text().replace("{PLACEHOLDER}", str(root)))
"""


def conda_packed(archive: Path, folder: Path, refuses: bool = False) -> Path:
    """The archive's environment as conda-pack lays it out: the interpreter as a file, activate and
    conda-unpack beside it, the prefix of the build in the files."""
    root = folder / "packed"
    with tarfile.open(archive) as tar:
        tar.extractall(root, **({"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}))
    (root / "bin/activate").write_text("# sets PATH\n")
    (root / "bin/conda-unpack").write_text(CONDA_UNPACK)
    (root / "bin/conda-unpack").chmod(0o755)
    (root / "conda-meta").mkdir()
    (root / "conda-meta/history").write_text("")
    (module,) = root.glob("lib/python*/site-packages/only_here.py")
    module.write_text(f"VALUE = 'found'\nPREFIX = '{PLACEHOLDER}'\n")
    if refuses:
        (root / "refuse").touch()
    path = folder / "packed.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for entry in sorted(root.iterdir()):
            tar.add(entry, entry.name)
    return path


@pytest.mark.slow
def test_conda_unpack_is_run_once_with_the_interpreter_of_the_archive(tmp_path: Path, archive: Path) -> None:
    packed, repository = conda_packed(archive, tmp_path), tmp_path / "models"
    parameter = f' parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{packed}" }} }}'
    code = MODEL.replace("sys.prefix, only_here.VALUE", "only_here.PREFIX, only_here.VALUE").replace(
        "import only_here",
        "import only_here, shutil; assert shutil.which('conda-unpack') == sys.prefix + '/bin/conda-unpack'",
    )
    for name in ("one", "two"):
        python_model(repository, name, code, f'backend: "python" name: "{name}"' + parameter)
    with ServerProcess(
        repository, f"--backend-config=python,environment-cache-directory={tmp_path / 'cache'}"
    ) as server:
        folder = prefix(server, "one")
        assert folder == prefix(server, "two") and folder.parent == tmp_path / "cache"
        assert (folder / "runs").read_text() == f"{folder}\n"
        assert "conda-unpack" not in server.log()


def test_conda_unpack_knows_nothing_of_our_environment(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = conda_packed(archive, tmp_path)
    for name in ("PYTHONHOME", "PYTHONPATH"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    python = interpreter(str(packed), tmp_path, tmp_path / "cache")
    assert (Path(python).parent.parent / "runs").is_file()


def test_conda_unpack_that_fails_is_told(
    tmp_path: Path, archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment may serve all the same: a Triton server does not run it at all."""
    packed = conda_packed(archive, tmp_path, refuses=True)
    python = Path(interpreter(str(packed), tmp_path, tmp_path / "cache"))
    assert python.is_file() and (python.parent.parent / COMPLETE).exists()
    assert caplog.messages == [f"conda-unpack of '{packed}' failed: no prefix here\n"]


HANGS = """
import json, threading

class TritonPythonModel:
    def execute(self, requests):
        if json.loads(requests[0].parameters())["how"] == "hang":
            threading.Event().wait()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.slow
def test_a_hung_execute_is_bounded_there_too(tmp_path: Path) -> None:
    """The process, which has no rings, is killed; its request fails with the reason and a new one serves."""
    parameters = "".join(
        f' parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
        for key, value in (("EXECUTION_ENV_PATH", sys.prefix), ("EXECUTE_TIMEOUT_SECONDS", "1.5"))
    )
    python_model(tmp_path, "hangs", HANGS, config() + parameters)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        assert client.infer("hangs", [tensor], parameters={"how": "echo"}).as_numpy("OUT").tolist() == [1]
        with pytest.raises(InferenceServerException, match=r"did not return within 1\.5 s") as failure:
            client.infer("hangs", [tensor], parameters={"how": "hang"})
        assert failure.value.status() == "504"
        until(lambda: client.is_model_ready("hangs"), server.log)
        assert client.infer("hangs", [tensor], parameters={"how": "echo"}).as_numpy("OUT").tolist() == [1]
