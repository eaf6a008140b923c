"""How the backends of installed packages are found, and what is said where something of them is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neptrio import extras
from neptrio.backends import packages, registry
from neptrio.config import model_config
from neptrio.errors import InvalidArgument
from neptrio.settings import Settings
from tests.support.control import load, post, refused
from tests.support.repository import write_model
from tests.support.server import ServerProcess

MODEL = """{imports}
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""


def install(
    site: Path, distribution: str, entry: str, module: str, imports: str = "", requires: tuple[str, ...] = ()
) -> Path:
    """Lays a package out in `site` as an installation does; returns its model.py."""
    information = site / f"{distribution.replace('-', '_')}-1.dist-info"
    information.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", "Version: 1"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (information / "METADATA").write_text("\n".join([*lines, ""]))
    (information / "entry_points.txt").write_text(f"[{packages.GROUP}]\n{entry}\n")
    folder = site.joinpath(*module.split("."))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL.format(imports=imports))
    return folder / "model.py"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def backend_file(name: str, tmp_path: Path, directory: Path | None = None, text: str = "") -> Path | None:
    """The model.py that serves a model of backend `name`."""
    config = model_config.parse_text(f'backend: "{name}" {text}', "config.pbtxt")
    found = registry.find_for(config, Settings(model_repository=(tmp_path,), backend_directory=directory))
    file: Path | None = getattr(found, "shared_file", None)
    return file


def test_a_package_in_a_package_is_found_and_none_of_it_is_imported(site: Path, tmp_path: Path) -> None:
    file = install(site, "some-backends", "scale = outer.inner.scale", "outer.inner.scale")
    for folder in (site / "outer", site / "outer/inner", file.parent):
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
    assert backend_file("scale", tmp_path) == file
    assert "scale" in registry.names()


def test_a_folder_of_the_flag_wins_over_a_package_and_the_servers_own_over_both(
    site: Path, tmp_path: Path
) -> None:
    packaged = install(site, "some-scale", "scale = scale_package", "scale_package")
    install(site, "some-kernel", "kernel = kernel_package", "kernel_package")
    directory = tmp_path / "backends"
    for name in ("scale", "kernel"):
        (directory / name).mkdir(parents=True)
        (directory / name / "model.py").write_text(MODEL.format(imports=""))
    assert backend_file("scale", tmp_path) == packaged
    assert backend_file("scale", tmp_path, directory) == directory / "scale/model.py"
    assert backend_file("kernel", tmp_path, directory) is None


def test_two_packages_with_one_name_are_refused(site: Path, tmp_path: Path) -> None:
    install(site, "one-scale", "scale = one_scale", "one_scale")
    install(site, "other-scale", "scale = other_scale", "other_scale")
    with pytest.raises(InvalidArgument, match=r"several installed packages \(one-scale and other-scale\)"):
        backend_file("scale", tmp_path)


def test_what_is_installed_and_removed_while_the_server_runs_is_noticed(site: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="unable to find backend library for backend 'scale'"):
        backend_file("scale", tmp_path)
    file = install(site, "some-scale", "scale = scale_package", "scale_package")
    os.utime(site, ns=(1, 1))  # the clock of the file system may not have moved on
    assert backend_file("scale", tmp_path) == file
    for old in (site / "some_scale-1.dist-info").iterdir():
        old.unlink()
    (site / "some_scale-1.dist-info").rmdir()
    os.utime(site, ns=(2, 2))
    with pytest.raises(InvalidArgument, match="unable to find backend library"):
        backend_file("scale", tmp_path)


def test_a_package_without_its_folder_is_named(site: Path, tmp_path: Path) -> None:
    install(site, "some-scale", "scale = scale_package.gone", "scale_package")
    with pytest.raises(InvalidArgument, match="package 'some-scale' says that backend 'scale' is in"):
        backend_file("scale", tmp_path)


@pytest.mark.parametrize("value", ["no name at all", ":attribute", "a..b", "[extra]"])
def test_an_entry_point_that_is_none_concerns_its_backend_alone(
    site: Path, tmp_path: Path, value: str
) -> None:
    install(site, "broken-package", f"broken = {value}", "scale_package")
    file = install(site, "some-scale", "scale = scale_package", "scale_package")
    assert backend_file("scale", tmp_path) == file
    with pytest.raises(InvalidArgument, match="backend 'broken'"):
        backend_file("broken", tmp_path)


def test_a_name_that_nearly_is_a_backends_gets_a_hint(site: Path, tmp_path: Path) -> None:
    install(site, "some-scale", "scale = scale_package", "scale_package")
    with pytest.raises(InvalidArgument, match=r"did you mean 'scale'\?"):
        backend_file("scales", tmp_path)


def test_a_model_with_an_environment_of_its_own_needs_nothing_in_the_servers(
    site: Path, tmp_path: Path
) -> None:
    file = install(site, "some-scale", "scale = scale_package", "scale_package", "import no_such_one")
    with pytest.raises(InvalidArgument, match="needs 'no_such_one'"):
        backend_file("scale", tmp_path)
    own = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/some/environment" } }'
    assert backend_file("scale", tmp_path, text=own) == file


FAST = ("numpy", 'no_one>=1; extra == "fast"', "No-Two[more]<3 ; python_version > '3' and extra == 'slow'")


@pytest.mark.parametrize(
    ("requires", "imports", "said"),
    [
        (FAST, "import no_one", "'no_one', which is not installed: pip install 'some-scale[fast]'"),
        ((), "import no_one", "'no_one', which is not installed: pip install 'some-scale'"),
        (
            FAST,
            "import json, no_one.part\nfrom no_two.part import x",
            "'no_one' and 'no_two', which are not installed: pip install 'some-scale[fast,slow]'",
        ),
        (FAST, "import helper", "'no_one', which is not installed: pip install 'some-scale[fast]'"),
        (FAST, "try:\n    import no_one\nexcept ImportError:\n    pass", ""),
    ],
    ids=["extra", "package", "two", "beside", "optional"],
)
def test_what_is_not_installed_is_named_with_the_command(
    site: Path, tmp_path: Path, requires: tuple[str, ...], imports: str, said: str
) -> None:
    file = install(site, "some-scale", "scale = scale_package", "scale_package", imports, requires)
    file.with_name("helper.py").write_text("import no_one, model")
    if not said:
        assert backend_file("scale", tmp_path) == file
        return
    with pytest.raises(InvalidArgument) as refused:
        backend_file("scale", tmp_path)
    assert str(refused.value) == f"backend 'scale' needs {said}"


@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [
        ("fil", "treelite", "trees"),
        ("pytorch", "torch", "pytorch"),  # which two extras ask for
        ("openvino", "openvino", "openvino"),
        ("transformers", "torch", "transformers"),
    ],
)
def test_the_servers_own_packages_name_their_extras(backend: str, module: str, extra: str) -> None:
    entry = packages.find(backend)
    assert entry is not None and packages.model_file(entry).parent.name == backend
    assert entry.install([module]) == extras.install(extra)
    assert extras.install(extra).startswith(f"pip install '{module}"), (
        "not our own name, which nobody owns on an index"
    )


@pytest.mark.slow
def test_the_start_the_check_and_a_load_say_the_same(tmp_path: Path) -> None:
    site = tmp_path / "site"
    wanted = ("no_such_one; extra == 'fast'",)
    install(site, "some-scale", "scale = scale_package", "scale_package", "import no_such_one", wanted)
    repository = tmp_path / "models"
    write_model(repository, "m", 'backend: "scale"')
    said = "backend 'scale' needs 'no_such_one', which is not installed: pip install 'some-scale[fast]'"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    flags = ("--exit-on-error=false", "--model-control-mode=explicit", "--load-model=m")
    with ServerProcess(repository, *flags, env=environment) as server:
        (row,) = json.loads(post(server, "index").body)
        assert row["reason"] == f"Invalid argument: {said} ({repository}/m/config.pbtxt:1: backend)"
        assert said in " ".join(server.log().replace("|", " ").split())
        assert said in refused(load(server, "m"), 400)
    command = [sys.executable, "-m", "neptrio", "check", "--json", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    (problem,) = json.loads(done.stdout)["models"][0]["problems"]
    assert problem["message"] == said and problem["field"] == "backend"
