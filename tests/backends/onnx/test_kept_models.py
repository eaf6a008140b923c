"""Optimised ONNX models that are kept for their next load (backends.onnx.kept_models)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from onnx import helper, numpy_helper

from neptrio.backends.onnx import kept_models, library
from neptrio.backends.onnx.options import Options
from neptrio.backends.onnx.session import OnnxSession
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support import onnx_models
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.slow_models import parameter

OPTIONS = Options("m", 99, intra_threads=1)
CONFIG = 'backend: "onnxruntime" max_batch_size: 0 instance_group [ { count: 1 } ]\n'


def network(seed: int = 0) -> bytes:
    """Convolutions with weights by chance, which ONNX Runtime rewrites for the processor."""
    chance = np.random.default_rng(seed)

    def weights(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(chance.standard_normal(shape).astype(np.float32), name)

    return onnx_models.model(
        [
            helper.make_node("Conv", ["X", "A"], ["H"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["H"], ["R"]),
            helper.make_node("Conv", ["R", "B"], ["C"]),
            helper.make_node("ReduceMean", ["C"], ["M"], axes=[2, 3], keepdims=0),
            helper.make_node("MatMul", ["M", "D"], ["E"]),
            helper.make_node("Mul", ["E", "FACTOR"], ["Y"]),
        ],
        [onnx_models.tensor("X", "FP32", ["N", 3, 8, 8]), onnx_models.tensor("FACTOR", "FP32", [1])],
        [onnx_models.tensor("Y", "FP32", ["N", 5])],
        [
            weights("A", 16, 3, 3, 3),
            weights("B", 16, 16, 3, 3),
            weights("D", 16, 5),
            numpy_helper.from_array(np.array([2.0], np.float32), "FACTOR"),
        ],
    )


X = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    assert library.unusable() == ""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(network())
    return folder / "model.onnx"


def kept(cache: Path, path: Path, options: Options = OPTIONS) -> OnnxSession | None:
    return kept_models.session(cache, library.version(), path, options)


def answer(session: OnnxSession | None) -> bytes:
    assert session is not None
    (found,) = session.run(["Y"], [from_numpy("X", X)])
    return to_numpy(found).tobytes()


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "onnx").iterdir())


def test_what_is_kept_is_the_same_model(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = OnnxSession(path, OPTIONS)
    first = kept(tmp_path / "cache", path)
    (entry,) = entries(tmp_path / "cache")
    monkeypatch.setattr(kept_models, "_write", None)  # from now on nothing is written
    again = kept(tmp_path / "cache", path)
    assert answer(first) == answer(again) == answer(plain)
    assert again is not None
    told = [
        (one.get_inputs(), one.get_overridable_initializers(), one.get_outputs()) for one in (again, plain)
    ]
    assert repr(told[0]) == repr(told[1])
    assert entry.stat().st_mode & 0o777 == 0o600 and entry.parent.stat().st_mode & 0o777 == 0o700


def test_an_entry_is_of_these_files_options_and_this_release_only(tmp_path: Path, path: Path) -> None:
    cache = tmp_path / "cache"
    old = answer(kept(cache, path))
    time_ns = path.stat().st_mtime_ns
    path.write_bytes(network(2))  # as large as before
    os.utime(path, ns=(time_ns, time_ns))
    new = answer(kept(cache, path))
    assert new == answer(OnnxSession(path, OPTIONS)) != old
    assert len(entries(cache)) == 2
    assert answer(kept(cache, path, replace(OPTIONS, level=1))) == answer(
        OnnxSession(path, replace(OPTIONS, level=1))
    )
    assert len(entries(cache)) == 3
    kept_models.session(cache, "1.0", path, OPTIONS)
    assert len(entries(cache)) == 4
    (path.parent / "weights.bin").write_bytes(b"more")
    kept(cache, path)
    assert len(entries(cache)) == 5


READ_ONLY = """
import sys
from pathlib import Path
from tests.backends.onnx import test_kept_models as tests
tests.kept_models._write = None
print("found" if tests.kept(Path(sys.argv[1]), Path(sys.argv[2])) is not None else "not found")
"""


@pytest.mark.slow
def test_what_is_kept_is_read_where_nothing_can_be_written(tmp_path: Path, path: Path) -> None:
    cache = tmp_path / "cache"
    kept(cache, path)
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; exec "$3" -c "$4" "$1" "$2"'
    arguments = ["sh", "-c", mount, "sh", str(cache), str(path), sys.executable, READ_ONLY]
    done = subprocess.run(["unshare", "--mount", *arguments], capture_output=True, text=True)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("only root may mount")
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "one bit"])
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path,
    path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tmp_path / "cache"
    right = answer(kept(cache, path))
    (entry,) = entries(cache)
    content = entry.read_bytes()
    turned = bytearray(content)
    turned[len(turned) // 2] ^= 1
    entry.write_bytes(
        {"empty": b"", "cut": content[:1000], "other": b"no model of any kind", "one bit": bytes(turned)}[
            damage
        ]
    )
    with caplog.at_level(logging.INFO):
        assert answer(kept(cache, path)) == right
    assert "cannot be used and is made anew" in caplog.text
    assert entries(cache) == [entry]
    monkeypatch.setattr(kept_models, "_write", None)  # from now on nothing is written
    assert answer(kept(cache, path)) == right


@pytest.mark.parametrize("how", ["others may write", "a link", "two names"])
def test_an_entry_that_others_may_have_written_is_not_used(tmp_path: Path, path: Path, how: str) -> None:
    cache = tmp_path / "cache"
    right = answer(kept(cache, path))
    (entry,) = entries(cache)
    other = tmp_path / "other.onnx"
    other.write_bytes(network(2))
    assert answer(kept(tmp_path / "others", other)) != right
    (theirs,) = entries(tmp_path / "others")
    if how == "others may write":
        entry.write_bytes(theirs.read_bytes())
        entry.chmod(0o602)
    else:
        entry.unlink()
        entry.symlink_to(theirs) if how == "a link" else entry.hardlink_to(theirs)
    assert answer(kept(cache, path)) == right
    assert entries(cache) == [entry] and not entry.is_symlink() and entry.stat().st_nlink == 1


@pytest.mark.parametrize("how", ["writable", "a link", "a file"])
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    if how == "writable":
        (cache / "onnx").mkdir()
        (cache / "onnx").chmod(0o777)
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (cache / "onnx").symlink_to(tmp_path / "elsewhere")
    else:
        (cache / "onnx").write_text("")
    for _ in range(2):
        assert kept(cache, path) is None
    assert caplog.text.count("only this user can write to") == 1
    assert how == "a file" or not entries(cache)


def test_one_session_writes_an_entry(tmp_path: Path, path: Path) -> None:
    cache = tmp_path / "cache"
    kept(cache, path)
    (entry,) = entries(cache)
    entry.unlink()
    writing = entry.with_suffix(".part")
    writing.write_bytes(b"")
    assert kept(cache, path) is None, "another one writes it"
    assert entries(cache) == [writing]
    long_ago = time.time() - 2 * kept_models.STALE_SECONDS
    os.utime(writing, (long_ago, long_ago))
    assert kept(cache, path) is not None, "that one has died"
    assert entries(cache) == [entry]


def test_what_was_used_longest_ago_goes_first(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    kept(cache, path)
    (first,) = entries(cache)
    monkeypatch.setattr(kept_models, "MOST_BYTES", int(first.stat().st_size * 2.5))
    os.utime(first, (1, 1))
    kept(cache, path, replace(OPTIONS, level=1))
    (second,) = set(entries(cache)) - {first}
    os.utime(second, (2, 2))
    kept(cache, path)  # which uses the first again
    kept(cache, path, replace(OPTIONS, intra_threads=2))
    assert first in entries(cache) and second not in entries(cache) and len(entries(cache)) == 2


def test_models_that_are_not_kept(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    for entry in (
        ("session.load_model_format", "ONNX"),
        ("session.optimized_model_external_initializers_file_name", "x"),
        ("session.use_ort_model_bytes_for_initializers", "1"),
    ):
        assert kept(cache, path, replace(OPTIONS, entries=(entry,))) is None
    assert kept(cache, path, replace(OPTIONS, libraries=(Path("lib.so"),))) is None
    monkeypatch.setattr(kept_models, "LARGEST_MODEL", 1000)
    assert kept(cache, path) is None
    path.write_bytes(b"no model")
    monkeypatch.setattr(kept_models, "LARGEST_MODEL", 1 << 30)
    assert kept(cache, path) is None, "the load itself says what is wrong"
    assert entries(cache) == []


@pytest.mark.slow
def test_a_server_keeps_models(tmp_path: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    write_model(repository, "m", CONFIG, {"1/model.onnx": network()})
    # a session that uses the bytes of what is kept after they were unmapped would end the server
    entry = parameter("session.use_ort_model_bytes_for_initializers", "1")
    large = onnx_models.model(
        [
            helper.make_node("Add", ["X", "B"], ["H"]),
            helper.make_node("ReduceMax", ["H"], ["Y"], keepdims=1, axes=[0]),
        ],
        [onnx_models.tensor("X", "FP32", [1])],
        [onnx_models.tensor("Y", "FP32", [1])],
        [numpy_helper.from_array(np.arange(1 << 20, dtype=np.float32), "B")],
    )
    write_model(repository, "bytes", CONFIG + entry, {"1/model.onnx": large})
    flags = "--model-control-mode=on-demand", "--model-memory-budget=100MiB"
    found = []
    for more in ((), (f"--model-cache-directory={cache}",)):
        with (
            ServerProcess(repository, *flags, *more) as server,
            httpclient.InferenceServerClient(server.http) as http,
        ):
            for _ in range(2):
                given = httpclient.InferInput("X", list(X.shape), "FP32")
                given.set_data_from_numpy(X)
                found.append(http.infer("m", [given]).as_numpy("Y").tobytes())
                http.unload_model("m")
            one = httpclient.InferInput("X", [1], "FP32")
            one.set_data_from_numpy(np.ones(1, np.float32))
            for _ in range(2):
                assert http.infer("bytes", [one]).as_numpy("Y")[0] == 1 << 20
                http.unload_model("bytes")
    assert len(set(found)) == 1
    assert [one.suffix for one in entries(cache)] == [".ort"]
