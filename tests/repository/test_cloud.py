"""Repositories in cloud storage: fsspec's memory, an HTTP server, and an S3 server of moto."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio.errors import Unavailable
from neptrio.repository.cloud import CloudRepository
from neptrio.repository.repositories import Repositories
from neptrio.settings import Settings
from tests.repository.test_check import check
from tests.support import onnx_models
from tests.support.control import infer, load, refused, rows
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

ONNX = 'backend: "onnxruntime" '
PYTHON_IO = identity_config().replace('"identity"', '"python"')
CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n"


def store(url: str, files: dict[str, str | bytes], **options: Any) -> None:
    """Writes files below a URL."""
    storage, root = fsspec.core.url_to_fs(url, **options)
    for path, content in files.items():
        storage.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
        storage.pipe_file(f"{root}/{path}", content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL of fsspec's in-memory storage, empty."""
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]
    yield "memory://models"
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]


def test_only_what_changed_is_fetched_again(memory: str, tmp_path: Path) -> None:
    store(memory, {"m/config.pbtxt": "one", "m/1/weights": b"w" * 1000, "m/1/other": b"o"})
    repository = CloudRepository(memory, tmp_path)
    repository.refresh()
    assert list(repository.model_dirs()) == ["m"] and repository.statistics().files_fetched == 0
    first = repository.localise("m")
    folder = repository.model_dirs()["m"]
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*")} == {
        "config.pbtxt",
        "1",
        "1/weights",
        "1/other",
    }
    assert repository.statistics().files_fetched == 3 and repository.statistics().bytes_fetched == 1004
    assert repository.localise("m") == first == repository.state("m")
    assert repository.statistics().files_fetched == 3 and repository.statistics().files_kept == 3
    store(memory, {"m/config.pbtxt": "two"})
    assert repository.state("m") != first
    inode = (folder / "1" / "weights").stat().st_ino
    second = repository.localise("m")
    assert second != first and (folder / "config.pbtxt").read_text() == "two"
    assert (folder / "1" / "weights").stat().st_ino == inode, "linked, not fetched"
    assert repository.statistics().files_fetched == 4
    fsspec.filesystem("memory").rm("models/m/1/other")
    repository.localise("m")
    assert not (folder / "1" / "other").exists()
    # the next server starts with what this one has kept, but for what was damaged meanwhile
    (folder / "1" / "weights").write_bytes(b"x" * 1000)
    later = CloudRepository(memory, tmp_path)
    later.refresh()
    later.localise("m")
    assert later.statistics().files_fetched == 1
    assert (later.model_dirs()["m"] / "1" / "weights").read_bytes() == b"w" * 1000
    repository.close()
    assert folder.exists(), "the cache is kept"


def test_a_download_in_part_is_never_seen(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(memory, {"m/config.pbtxt": "one", "m/1/weights": b"w" * 1000})
    repository = CloudRepository(memory, tmp_path)
    repository.refresh()
    folder = repository.folder / "m"
    storage = type(fsspec.filesystem("memory"))
    get_file = storage.get_file

    def cut(self: Any, rpath: str, lpath: str, *more: Any, **options: Any) -> None:
        assert not folder.exists() or (folder / "config.pbtxt").read_text() == "one"
        get_file(self, rpath, lpath, *more, **options)
        if rpath.endswith("weights"):
            os.truncate(lpath, 10)

    monkeypatch.setattr(storage, "get_file", cut)
    with pytest.raises(Unavailable, match="has 1000 bytes, 10 came: fetched in part"):
        repository.localise("m")
    assert not folder.exists()
    monkeypatch.setattr(storage, "get_file", get_file)
    repository.localise("m")
    monkeypatch.setattr(storage, "get_file", cut)
    store(memory, {"m/config.pbtxt": "two", "m/1/weights": b"v" * 1000})
    with pytest.raises(Unavailable, match="fetched in part"):
        repository.localise("m")
    assert (folder / "config.pbtxt").read_text() == "one"
    assert (folder / "1" / "weights").read_bytes() == b"w" * 1000
    assert not list((repository.folder.parent / "work").iterdir())

    def changing(self: Any, rpath: str, lpath: str, *more: Any, **options: Any) -> None:
        get_file(self, rpath, lpath, *more, **options)
        store(memory, {"m/1/weights": os.urandom(1000)})

    monkeypatch.setattr(storage, "get_file", changing)
    with pytest.raises(Unavailable, match="kept changing while it was fetched"):
        repository.localise("m")


def test_hostile_names_and_unreachable_storage(memory: str, tmp_path: Path) -> None:
    store(
        memory, {"m/config.pbtxt": "one", "m/../../../escape": "x", f"m/{'a' * 300}": "x", ".hidden/x": "x"}
    )
    repository = CloudRepository(memory, tmp_path)
    repository.refresh()
    assert ".hidden" not in repository.model_dirs()
    with pytest.raises(Unavailable, match="which is no file name here"):
        repository.localise("m")
    gone = CloudRepository("nosuchscheme://user:secret@host/x", None)
    gone.refresh()
    assert "nosuchscheme" in gone.problem and "secret" not in gone.problem
    assert gone.model_dirs() == {}
    gone.close()


def test_one_model_is_found_without_a_listing_of_all(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every model is looked for by its name at the start, so a listing for each would be made thousands of times."""
    store(memory, {f"{name}/config.pbtxt": "" for name in ("b", "both", ".hidden")})
    store(f"{memory}2", {f"{name}/config.pbtxt": "" for name in ("both", "c")})
    write_model(tmp_path / "local", "both", identity_config())
    places = (tmp_path / "local", memory, f"{memory}2")
    repositories = Repositories(Settings(model_repository=places, model_repository_cache=tmp_path / "cache"))
    repositories.refresh()
    listed = repositories.model_dirs()
    assert {name: len(folders) for name, folders in listed.items()} == {"b": 1, "both": 3, "c": 1}
    asked: list[str] = []
    monkeypatch.setattr(CloudRepository, "model_dirs", lambda cloud: asked.append(cloud.url) or {})
    for name in (*listed, ".hidden", "", "..", "nope"):
        assert repositories.folders(name) == listed.get(name, []), name
    assert repositories.folders("both", "models2") == listed["both"][2:]
    assert list(repositories.names().items()) == [("b", 1), ("both", 3), ("c", 1)]
    assert not asked
    repositories.close()


@pytest.mark.slow
def test_a_server_with_a_repository_in_memory(memory: str, tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_model(local, "here", identity_config())
    store(memory, {"onnx/config.pbtxt": ONNX, "onnx/1/model.onnx": onnx_models.add_sub()})
    store(memory, {"python/config.pbtxt": PYTHON_IO, "python/1/model.py": CODE})
    options = {"model_control_mode": "poll", "repository_poll_secs": 3600.0}
    with EmbeddedServer(memory, exit_on_error=False, **options) as server:  # type: ignore[arg-type]
        manager = server.server.repository

        def poll() -> dict[str, Any]:
            server.run(manager.poll_once)
            return {row["name"]: row for row in server.ask(manager.index, False)}

        assert {n: r["state"] for n, r in poll().items()} == {"onnx": "READY", "python": "READY"}
        first = server.ask(manager.lookup, "onnx")
        poll()
        assert server.ask(manager.lookup, "onnx") is first, "nothing changed"
        store(memory, {"onnx/config.pbtxt": ONNX + "max_batch_size: 2"})
        poll()
        assert server.ask(manager.lookup, "onnx").max_batch_size == 2
        store(memory, {"onnx/config.pbtxt": "oops"})
        assert poll()["onnx"]["state"] == "READY", "the old one serves"
        store(memory, {"new/config.pbtxt": ONNX, "new/1/model.onnx": onnx_models.identity()})
        fsspec.filesystem("memory").rm("models/python", recursive=True)
        assert set(poll()) == {"onnx", "new"}
        (mirror,) = manager.repositories.cloud
        folder = mirror.folder
    assert not folder.exists(), "a mirror that nobody asked to keep is removed"


# ------------------------------------------------------------------------------ real servers


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_an_http_server(tmp_path: Path) -> None:
    there, local = tmp_path / "there", tmp_path / "local"
    write_model(there, "onnx", ONNX, {"1/model.onnx": onnx_models.add_sub()})
    write_model(local, "m", identity_config())
    Quiet.asked = []
    with serving(functools.partial(Quiet, directory=str(there))) as web:
        url = f"http://127.0.0.1:{web.server_port}"
        flags = ("--model-control-mode=explicit", "--load-model=*", f"--model-repository={url}")
        with ServerProcess(local, *flags, f"--model-repository-cache={tmp_path / 'cache'}") as server:
            with httpclient.InferenceServerClient(server.http) as client:
                assert rows(client, "onnx") == [("1", "READY", "")]
                infer(client, "onnx", ("A", "B"))
                assert Quiet.asked.count("/onnx/1/model.onnx") == 1
                client.load_model("onnx")
                assert Quiet.asked.count("/onnx/1/model.onnx") == 1, "unchanged"
                (there / "onnx" / "config.pbtxt").write_text(ONNX + "max_batch_size: 2 ")
                client.load_model("onnx")
                assert client.get_model_config("onnx")["max_batch_size"] == 2
                assert Quiet.asked.count("/onnx/1/model.onnx") == 1, "only the configuration was fetched"
                web.shutdown()
                web.socket.close()
                reason = refused(load(server, "onnx"), 500)
                assert f"repository '{url}' cannot be read: " in reason
                infer(client, "onnx", ("A", "B"))
                client.load_model("m")
                infer(client)
                assert client.is_server_ready()
                assert "cannot be read" in refused(load(server, "nope"), 500)
        # its storage away, a server starts with what is left, and says why
        flags = ("--exit-on-error=false", f"--model-repository={url}")
        with ServerProcess(local, *flags) as server:
            with httpclient.InferenceServerClient(server.http) as client:
                infer(client)
            server.until_logged(f"repository '{url}' cannot be read: ")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of an S3 server in a process of its own."""
    code = (
        "from moto.server import ThreadedMotoServer as S\nimport sys\n"
        "s = S(ip_address='127.0.0.1', port=0)\ns.start()\nprint('PORT', s._server.server_port, flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    port = next((line.split()[1] for line in process.stdout if line.startswith("PORT")), "")
    assert port, "the S3 server did not start"
    yield f"http://127.0.0.1:{port}"
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.mark.slow
def test_an_s3_server(s3: str, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    script = (
        "import fsspec, json, sys\nfs = fsspec.filesystem('s3', endpoint_url=sys.argv[1])\n"
        "fs.exists('bucket') or fs.mkdir('bucket')\n"
        "[fs.pipe_file('bucket/' + p, bytes.fromhex(c)) for p, c in json.load(sys.stdin).items()]\n"
    )
    environment = {**os.environ, **keys, "AWS_ENDPOINT_URL": s3, "FSSPEC_S3_ENDPOINT_URL": s3}

    def put(files: dict[str, bytes]) -> None:
        text = json.dumps({path: content.hex() for path, content in files.items()})
        subprocess.run(
            [sys.executable, "-c", script, s3], input=text, text=True, env=environment, check=True, timeout=60
        )

    put({"models/m/config.pbtxt": ONNX.encode(), "models/m/1/model.onnx": onnx_models.add_sub()})
    put({"models/p/config.pbtxt": PYTHON_IO.encode(), "models/p/1/model.py": CODE.encode()})
    local = tmp_path / "local"
    write_model(local, "here", identity_config())
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1", "--model-repository=s3://bucket/models")
    with ServerProcess(local, *flags, env=environment) as server:
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            assert rows(client, "m") == [("1", "READY", "")] and rows(client, "p") == [("1", "READY", "")]
            np.testing.assert_array_equal(infer(client, "m", ("A", "B")).as_numpy("SUM"), np.full((1, 16), 2))
            put({"models/m/2/model.onnx": onnx_models.add_sub()})
            until(lambda: ("2", "READY", "") in rows(client, "m"), "the poll sees the new version")
            infer(client, "m", ("A", "B"))
    # the URL of one model instead of a repository's
    one = ("--model-repository=s3://bucket/models/m", "--model-name=sums")
    with ServerProcess(None, *one, env=environment) as server:
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            np.testing.assert_array_equal(
                infer(client, "sums", ("A", "B")).as_numpy("SUM"), np.full((1, 16), 2)
            )


@pytest.mark.slow
def test_checking_cloud_storage(tmp_path: Path) -> None:
    write_model(tmp_path, "good", ONNX, {"1/model.onnx": onnx_models.add_sub()})
    write_model(tmp_path, "bad", "oops", {"1/model.onnx": b"x"})
    Quiet.asked = []
    with serving(functools.partial(Quiet, directory=str(tmp_path))) as web:
        url = f"http://127.0.0.1:{web.server_port}"
        status, text = check(url)
        assert (
            status == 1 and "2 models: 1 without errors; 1 error," in text and "bad/config.pbtxt:1:" in text
        )
    status, text = check(url)
    assert status == 2 and "cannot be read" in text


@pytest.mark.slow
def test_nothing_is_imported_when_it_is_not_used(tmp_path: Path) -> None:
    code = (
        "import sys, neptrio.server\nfrom neptrio.settings import Settings\nfrom pathlib import Path\n"
        f"from neptrio.repository.repositories import Repositories\nRepositories(Settings(model_repository=(Path({str(tmp_path)!r}),))).model_dirs()\n"
        "assert not {'fsspec', 's3fs', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
