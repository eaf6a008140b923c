"""The example repository as `make run` serves it, its clients, and the types of real files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tarfile
import urllib.request
import wave
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio import datatypes
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example repository, prepared as `make run` does: a copy, since others may prepare it meanwhile."""
    folder = tmp_path_factory.mktemp("examples") / "model_repository"
    shutil.copytree(EXAMPLES / "model_repository", folder)
    prepare = load(EXAMPLES / "prepare.py")
    prepare.prepare_file_type(folder)
    prepare.prepare_speech_detection(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository) as process:
        yield process


def png(width: int, height: int) -> bytes:
    """A gradient."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def real_files(folder: Path, repository: Path) -> dict[Path, str]:
    """File -> the type it has: the project's own files, and files made by the standard library."""
    (folder / "image").write_bytes(png(64, 64))
    with zipfile.ZipFile(folder / "archive", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.write(ROOT / "README.md", "README.md")
        zipped.write(ROOT / "Makefile", "Makefile")
    with tarfile.open(folder / "tape", "w") as tape:
        tape.add(ROOT / "pyproject.toml", "pyproject.toml")
    (folder / "squeezed").write_bytes(gzip.compress((ROOT / "LICENSE").read_bytes()))
    database = sqlite3.connect(folder / "rows")
    database.execute("create table t (a integer, b text)")
    database.commit()
    database.close()
    with wave.open(str(folder / "sound"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes((np.sin(np.arange(8000) / 9) * 9000).astype("<i2").tobytes())
    (folder / "data").write_text(
        json.dumps([{"name": f"n{i}", "value": i * 1.5} for i in range(50)], indent=1)
    )
    (folder / "array").touch()
    with (folder / "array").open("wb") as file:
        np.save(file, np.arange(1000))
    (folder / "short").write_text("hi")
    (folder / "nothing").touch()
    (folder / "bits").write_bytes(b"\xff\xfe\x00")
    library = next((ROOT / "src" / "neptrio" / "request").glob("*.so"), None)
    found = {
        ROOT / "setup.py": "python",
        ROOT / "src" / "neptrio" / "server.py": "python",
        ROOT / "Makefile": "makefile",
        ROOT / "pyproject.toml": "toml",
        ROOT / "proto" / "grpc_service.proto": "proto",
        ROOT / "LICENSE": "txt",
        ROOT / "CHANGELOG.md": "markdown",
        ROOT / "tools" / "system_libraries.sh": "shell",
        repository / "file_type_scores" / "1" / "model.onnx": "onnx",
        folder / "image": "png",
        folder / "archive": "zip",
        folder / "tape": "tar",
        folder / "squeezed": "gzip",
        folder / "rows": "sqlite",
        folder / "sound": "wav",
        folder / "data": "json",
        folder / "array": "npy",
        folder / "short": "txt",
        folder / "nothing": "empty",
        folder / "bits": "unknown",
    }
    if library is not None:
        found[library] = "elf"
    return found


@pytest.mark.slow
def test_file_types(server: ServerProcess, repository: Path, tmp_path: Path) -> None:
    expected = real_files(tmp_path, repository)
    with httpclient.InferenceServerClient(server.http) as client:
        types = load(EXAMPLES / "file_type.py").types_of(client, list(expected))
        # each of the ensemble's steps has seen every file
        for model in ("file_type", "file_type_ends", "file_type_scores", "file_type_label"):
            stats = client.get_inference_statistics(model)["model_stats"][0]
            assert stats["inference_count"] == len(expected), model
    got = {path.name: name for path, (name, _, _) in zip(expected, types, strict=True)}
    assert got == {path.name: name for path, name in expected.items()}
    assert all(description and 0 < score <= 1.001 for _, description, score in types)


def test_raw_bytes_in_and_a_label_out(server: ServerProcess) -> None:
    """A plain POST of a file's bytes, without JSON and without a client library."""
    url = f"http://{server.http}/v2/models/file_type/infer"
    content = (ROOT / "Makefile").read_bytes()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
    with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=60) as answer:
        length = int(answer.headers["Inference-Header-Content-Length"])
        result = httpclient.InferResult.from_response_body(answer.read(), header_length=length)
    assert result.as_numpy("LABEL").tolist() == [[b"makefile"]]
    assert 0 < result.as_numpy("SCORE")[0, 0] <= 1.001


@pytest.mark.slow
def test_the_command_prints_types(server: ServerProcess) -> None:
    command = [sys.executable, str(EXAMPLES / "file_type.py"), "--url", server.http]
    done = subprocess.run([*command, str(ROOT / "setup.py")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and ": python (Python source)" in done.stdout, done
    done = subprocess.run([*command, "/nonexistent/file"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "protocol", "expected"),
    [
        ("http_simple.py", "http", "difference [-1  0  1  2"),
        ("grpc_strings.py", "grpc", "HELLO GRÜSSE DONE"),
        ("grpc_stream.py", "grpc", "4 4.0"),
        ("aio_many.py", "grpc", "0.0 1.0 2.0 3.0"),
    ],
)
def test_clients(server: ServerProcess, script: str, protocol: str, expected: str) -> None:
    command = [sys.executable, str(EXAMPLES / "clients" / script), getattr(server, protocol)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_every_client_is_tested() -> None:
    scripts = {row[0] for row in test_clients.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert scripts == {path.name for path in (EXAMPLES / "clients").glob("*.py")}


@pytest.mark.parametrize("number", sorted(datatypes.TABLE))
def test_identity_of_every_datatype(server: ServerProcess, number: int) -> None:
    name, _, dtype = datatypes.TABLE[number]
    if number == datatypes.BYTES:
        value = np.array([[b"a", b"", b"\xff\x00"]], dtype=object)
    else:
        value = np.array([[0, 1, 1]]).astype(dtype)
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("INPUT0", [1, 3], name)
        tensor.set_data_from_numpy(value)
        got = client.infer(f"identity_{name.lower()}", [tensor]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(got.astype(value.dtype), value)


def test_the_model_without_a_configuration(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("mean")
        assert config["backend"] == "python" and config["max_batch_size"] == 8
        assert config["default_model_filename"] == "model.py"
        assert config["dynamic_batching"]["preferred_batch_size"] == [8]
        tensor = httpclient.InferInput("VALUES", [2, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2], [3, 5]], np.float32))
        np.testing.assert_array_equal(client.infer("mean", [tensor]).as_numpy("MEAN"), [[1.5], [4]])


@pytest.mark.slow
def test_the_program_of_the_in_process_interface(repository: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "in_process.py"), str(repository)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "first [['hello'], ['wörld']]" in done.stdout
    assert done.stdout.endswith("[[0.0, 0.0, 0.0, 0.0]]\n[[1.0, 1.0, 1.0, 1.0]]\n[[2.0, 2.0, 2.0, 2.0]]\n")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in that language; "": those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return [text for named, text in found if named == language]


@pytest.mark.slow
def test_the_first_request_of_the_readme_works_as_it_stands(server: ServerProcess) -> None:
    [request] = [text for text in blocks("README.md", "") if "curl" in text]
    command = request.replace("localhost:8000", server.http)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    outputs = {output["name"]: output["data"] for output in json.loads(done.stdout)["outputs"]}
    assert outputs == {"OUTPUT0": list(range(2, 18)), "OUTPUT1": list(range(16))}


@pytest.mark.slow
def test_the_program_of_the_readme_works_as_it_stands(tmp_path: Path) -> None:
    [program] = blocks("README.md", "python")
    (tmp_path / "app.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "hello you" in done.stdout


@pytest.mark.slow
def test_the_program_of_the_page_on_clients_works_as_it_stands(server: ServerProcess) -> None:
    [program] = blocks("docs/clients.md", "python")
    command = [sys.executable, "-c", program.replace("localhost:8000", server.http)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "HELLO" in done.stdout and "WORLD" in done.stdout


def test_the_readme_s_first_screen_says_what_it_is_and_what_it_is_not() -> None:
    """Before the first heading: for whom, why, for what not. Ten bullets, six figures, two commands."""
    readme = (ROOT / "README.md").read_text()
    first = readme.partition("\n## ")[0]
    assert [word for word in ("**For whom.**", "**Why.**", "**For what not.**") if word not in first] == []
    assert "docs/images/console-overview.png" in first and "benchmarks/gpu.md" in first
    assert len(first) < 2000
    assert len(re.findall(r"^- \*\*", readme, re.M)) == 10
    assert not re.search(r"\b(targets?|missed)\b", readme)
    commands = [text for text in blocks("README.md", "") if text.startswith("make ")]
    assert len(commands) == 1 and len(commands[0].splitlines()) == 2
