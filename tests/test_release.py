"""tools/release.py: what `make release` adds to the wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHANGES = (
    "# Changelog\n\n## Unreleased\n- New.\n\n## 0.1.0 (2026-11-28)\n- First.\n- Second.\n\n## 0.0.9\n- Old.\n"
)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_tool", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_versions_of_this_tree_agree(release: ModuleType) -> None:
    assert release.version(ROOT).count(".") == 2


def test_versions_that_differ_end_it(release: ModuleType, tmp_path: Path) -> None:
    for place in ("pyproject.toml", "src/neptrio/__init__.py", f"{release.CHART}/Chart.yaml"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    file = tmp_path / release.CHART / "Chart.yaml"
    file.write_text(file.read_text().replace("appVersion: ", 'appVersion: "9.9.9" #'))
    with pytest.raises(SystemExit, match=r"the versions differ: .*Chart\.yaml 9\.9\.9"):
        release.version(tmp_path)


def test_the_changelog_is_added_changed_and_fixed_a_line_each(release: ModuleType) -> None:
    """What is written for readers is what a release's notes have: lists with these titles, one line for each change."""
    text = (ROOT / "CHANGELOG.md").read_text()
    notes = release.notes(text, release.version(ROOT))
    titles = ["### Added", "### Changed", "### Fixed"]
    _, _, *lines = notes.splitlines()
    assert lines[0] == titles[0], "a line stands above `### Added`: put it into its list"
    assert [line for line in lines if line.startswith("#")] == titles
    assert {line[:2] for line in lines if line and line not in titles} == {"- "}
    changes = [line for line in lines if line.startswith("- ")]
    assert len(changes) == len(set(changes)) > 100
    assert notes.count("\n- ") == text.count("\n- ")  # nothing is left out of the notes


def test_notes_are_the_section_of_the_version(release: ModuleType) -> None:
    assert release.notes(CHANGES, "0.1.0") == "# neptrio 0.1.0\n\n- First.\n- Second.\n"
    assert release.notes(CHANGES, "0.2.0") == "# neptrio 0.2.0\n\n- New.\n"
    with pytest.raises(SystemExit, match=r"no section '## 0\.2\.0'"):
        release.notes("# Changelog\n\n## Unreleased\n\n## 0.1.0\n- First.\n", "0.2.0")


def test_the_chart_is_the_same_bytes_each_time(release: ModuleType, tmp_path: Path) -> None:
    first = release.chart(ROOT, tmp_path, "0.1.0").read_bytes()
    file = release.chart(ROOT, tmp_path, "0.1.0")
    assert file.read_bytes() == first
    with tarfile.open(file) as made:
        names = made.getnames()
        assert "neptrio/Chart.yaml" in names and "neptrio/values.yaml" in names
        held = made.extractfile("neptrio/values.yaml")
        assert held is not None and held.read() == (ROOT / release.CHART / "values.yaml").read_bytes()


def test_a_release_of_files_that_are_built(release: ModuleType, tmp_path: Path) -> None:
    wheel = "neptrio-0.1.0-cp313-cp313-manylinux_2_36_x86_64.whl"
    for name in (
        wheel,
        "neptrio-0.0.9-cp313-cp313-manylinux_2_36_x86_64.whl",
        "neptrio-0.1.0.tar.gz",
        "other",
    ):
        (tmp_path / name).write_text(name)
    release.chart(ROOT, tmp_path, "0.1.0")
    files = release.parts(tmp_path, "0.1.0")
    assert [file.name for file in files] == [wheel, "neptrio-0.1.0.tar.gz", "neptrio-chart-0.1.0.tgz"]
    assert release.missing(files) == [
        "wheels for Python 3.11, 3.12, 3.14 on x86_64",
        "wheels for aarch64",
        f"the bill of materials of {wheel.replace('.whl', '')}.whl",
        "the image",
    ]
    own, other = ("x86_64", "aarch64") if platform.machine() == "x86_64" else ("aarch64", "x86_64")
    assert release.reason("the image", "no engine", []) == " (no engine)"
    assert "on such a machine" in release.reason(f"wheels for {other}", "", ["3.14"])
    without = f"wheels for Python 3.12, 3.14 on {own}"
    assert release.reason(without, "", ["3.14"]) == " (this machine has no Python 3.14)"
    assert release.reason(without, "", []) == ""
    text = release.sums(files)
    assert f"{hashlib.sha256(wheel.encode()).hexdigest()}  {wheel}\n" in text
    (tmp_path / "SHA256SUMS").write_text(text)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)
