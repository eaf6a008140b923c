"""Where libtriton_NAME.so is looked for, and what is said of one that is not there or cannot be opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as http

from neptrio.backends import registry
from neptrio.backends.compiled import find
from neptrio.backends.compiled.backend import CompiledBackend
from neptrio.backends.identity import IdentityBackend
from neptrio.backends.python import PythonBackend
from neptrio.config import model_config
from neptrio.errors import InvalidArgument
from neptrio.settings import Settings
from tests.support.repository import write_model
from tests.support.server import ServerProcess


def put(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"no library")
    return folder / name


def found(text: str, tmp_path: Path, **settings: Any) -> Any:
    config = model_config.parse_text(text, "config.pbtxt")
    directory = tmp_path / "backends"
    if directory.is_dir():
        settings["backend_directory"] = directory
    made = Settings(model_repository=(tmp_path,), **settings)
    backend = registry.find_for(config, made, (tmp_path / "model" / "1", tmp_path / "model"))
    registry.check_runtime(config, backend)
    return backend


def test_the_order_is_tritons(tmp_path: Path) -> None:
    text = 'backend: "mine"'
    places = [tmp_path / "backends" / "mine", tmp_path / "model", tmp_path / "model" / "1"]
    for place in places:  # each is found before those that were there already
        library = put(place, "libtriton_mine.so")
        backend = found(text, tmp_path)
        assert issubclass(backend, CompiledBackend) and backend.library == library


def test_runtime_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "backends" / "mine"
    put(folder, "libtriton_mine.so")
    other = put(folder, "libtriton_new.so")
    assert found('backend: "mine" runtime: "libtriton_new.so"', tmp_path).library == other
    with pytest.raises(InvalidArgument, match="unable to find backend library"):
        found('backend: "mine" runtime: "libtriton_old.so"', tmp_path)
    with pytest.raises(InvalidArgument, match="unable to find backend library"):
        found('backend: "mine" runtime: "../mine/libtriton_new.so"', tmp_path)
    put(tmp_path, "libtriton_...so")
    with pytest.raises(InvalidArgument):
        found('backend: ".."', tmp_path)
    (tmp_path / "model.py").write_text("")
    with pytest.raises(InvalidArgument):
        found('backend: ".."', tmp_path)
    (folder / "model.py").write_text("")
    assert not issubclass(found('backend: "mine" runtime: "model.py"', tmp_path), CompiledBackend)


def test_built_in_names_stay_ours_unless_the_library_is_asked_for(tmp_path: Path) -> None:
    library = put(tmp_path / "backends" / "python", "libtriton_python.so")
    put(tmp_path / "backends" / "identity", "libtriton_identity.so")
    text = 'backend: "python" runtime: "libtriton_python.so" '
    assert found(text, tmp_path) is PythonBackend
    assert found('backend: "identity" runtime: "libtriton_identity.so"', tmp_path) is IdentityBackend
    asking = text + 'parameters { key: "compiled" value: { string_value: "true" } }'
    assert found(asking, tmp_path).library == library
    assert found(text, tmp_path, backend_config={"python": {"compiled": "true"}}).library == library
    with pytest.raises(
        InvalidArgument, match=r"'libtriton_onnxruntime\.so' for backend 'onnxruntime', which is asked for"
    ):
        found(asking.replace("python", "onnxruntime"), tmp_path)
    with pytest.raises(InvalidArgument, match="parameter 'compiled' must be 'true' or 'false', got 'yes'"):
        found(asking.replace('"true"', '"yes"'), tmp_path)


def test_the_default_folders_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(tmp_path / "opt" / "tensorrt", "libtriton_tensorrt.so")
    with pytest.raises(InvalidArgument, match="is not part of this server"):
        found('backend: "tensorrt"', tmp_path)
    monkeypatch.setattr(find, "DEFAULTS", (str(tmp_path / "opt"),))
    assert found('backend: "tensorrt"', tmp_path).library == library


@pytest.mark.slow
def test_a_library_that_cannot_be_served_fails_its_model_with_the_reason(tmp_path: Path, probe: Path) -> None:
    write_model(tmp_path, "torn", 'backend: "torn"', {"libtriton_torn.so": b"no library"})
    write_model(tmp_path, "refused", 'backend: "probe"')
    shutil.copy(probe, tmp_path / "refused" / "1" / probe.name)
    write_model(
        tmp_path, "none", 'backend: "probe" parameters { key: "isolation" value: { string_value: "none" } }'
    )
    shutil.copy(probe, tmp_path / "none" / probe.name)
    server = ServerProcess(tmp_path, "--exit-on-error=false", "--strict-readiness=false")
    try:
        with http.InferenceServerClient(server.http) as client:
            reasons = {row["name"]: row.get("reason", "") for row in client.get_model_repository_index()}
    finally:
        server.stop()
    assert "unable to load shared library" in reasons["torn"] and "libtriton_torn.so" in reasons["torn"]
    assert "the probe does not like this model" in reasons["refused"]
    assert "which runs in a process of its own" in reasons["none"]


def test_a_cache_is_found_in_its_folder_only(tmp_path: Path) -> None:
    settings = Settings(model_repository=(tmp_path,), cache_directory=tmp_path)
    library = put(tmp_path / "mine", "libtritoncache_mine.so")
    assert find.cache("mine", settings) == library
    put(tmp_path, "libtritoncache_..so")
    for name in ("other", "mine/../mine", ".", "..", ""):
        with pytest.raises(InvalidArgument, match=f"there is no cache '{name}': looked for '{tmp_path}/"):
            find.cache(name, settings)
    with pytest.raises(
        InvalidArgument, match=r"looked for '/opt/tritonserver/caches/mine/.*--cache-directory names"
    ):
        find.cache("mine", Settings(model_repository=(tmp_path,)))
