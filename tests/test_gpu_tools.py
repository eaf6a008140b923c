"""What is carried to a GPU machine without a network, and what is done there: tools/gpu_wheels.py, tools/gpu_run.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tools import gpu_wheels

ROOT = Path(__file__).parent.parent
# stands for the machine's Python: notes what it is asked, and fails or hangs where that is wanted
PYTHON = """#!/bin/sh
case "$1" in -c) exit 0 ;; esac
echo "$* NEPTRIO_REQUIRE_GPU=$NEPTRIO_REQUIRE_GPU" >>"$SEEN"
echo "output of $2"
case "$*" in *"$HANGS"*) exec sleep 120 ;; esac
case "$*" in *"$FAILS"*) exit 3 ;; esac
"""


class Machine:
    """A tree with the script alone, and a Python that only notes. `run()` returns (status, report)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.seen = folder, folder / "out", folder / "seen"
        (folder / "tools").mkdir()
        shutil.copy(ROOT / "tools" / "gpu_run.sh", folder / "tools")
        (folder / "wheels").mkdir()
        (folder / "wheels" / "a-1-py3-none-any.whl").touch()
        (folder / "tests").mkdir()
        (folder / "tests" / "test_some.py").write_text("pytestmark = [pytest.mark.gpu]\n")
        (folder / "tests" / "test_other.py").touch()
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, *arguments: str, fails: str = "no step", hangs: str = "no step") -> tuple[int, str]:
        self.seen.write_text("")
        told = {"PYTHON": str(self.python), "OUT": str(self.out), "SEEN": str(self.seen)}
        done = subprocess.run(
            ["sh", self.folder / "tools" / "gpu_run.sh", "--wheels", self.folder / "wheels", *arguments],
            env=os.environ | told | {"FAILS": fails, "HANGS": hangs, "TEST_ARGS": "-k graph", "BENCH_ARGS": "--rounds 9"},
            capture_output=True,
            text=True,
        )  # fmt: skip
        return done.returncode, (self.out / "report.md").read_text() if self.out.exists() else done.stderr

    def steps(self) -> list[str]:
        """What the Python was asked, in order."""
        return self.seen.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def outcomes(report: str) -> dict[str, str]:
    """Step -> outcome, from the report's table."""
    rows = re.findall(r"^\| (\w+) \| `[^`]*` \| (.*) \| \d+ s \|$", report, re.M)
    return dict(rows)


def test_every_step_is_done_and_told(machine: Machine) -> None:
    status, report = machine.run()
    assert status == 0
    assert set(outcomes(report).values()) == {"passed"}
    assert list(outcomes(report)) == ["install", "build", "modules", "check", "test", "bench"]
    install, build, check, test, bench = machine.steps()
    assert "--no-index --no-deps" in install and install.endswith(
        "wheels/a-1-py3-none-any.whl NEPTRIO_REQUIRE_GPU=1"
    )
    assert build.startswith("setup.py build_ext --inplace")
    assert check.startswith("tools/gpu_check.py")
    assert test.startswith("-m pytest -m gpu or nvrtc -rA tests/test_some.py -k graph NEPTRIO_REQUIRE_GPU=1")
    assert bench.startswith("-m benchmarks.gpu --rounds 9")
    assert "output of benchmarks.gpu" in report, "the benchmark's Markdown"


def test_nothing_follows_a_build_that_failed(machine: Machine) -> None:
    status, report = machine.run(fails="build_ext")
    assert status == 1
    assert outcomes(report) == {"install": "passed", "build": "failed (3)"}
    assert len(machine.steps()) == 2


@pytest.mark.parametrize("content, outcome", [("a = 1\n", "passed"), ("a = 2\n", "failed (1)")])
def test_a_wheel_of_this_package_must_be_of_the_same_tree(
    machine: Machine, content: str, outcome: str
) -> None:
    """It would be tested in the tree's place."""
    for place, text in (("src/neptrio", "a = 1\n"), ("build/gpu-site/neptrio", content)):
        (machine.folder / place).mkdir(parents=True)
        (machine.folder / place / "some.py").write_text(text)
    (machine.folder / "build/gpu-site/neptrio/some.so").touch()
    _, report = machine.run("build")
    assert outcomes(report)["wheel"] == outcome
    assert ("modules" in outcomes(report)) == (outcome == "passed")
    assert outcome == "passed" or "some.py differ" in report


@pytest.mark.slow
def test_it_is_measured_where_a_test_failed(machine: Machine) -> None:
    status, report = machine.run("test", "bench", fails="pytest")
    assert status == 1
    assert outcomes(report) == {"test": "failed (3)", "bench": "passed"}


@pytest.mark.slow
def test_a_step_that_hangs_is_ended(machine: Machine) -> None:
    status, report = machine.run("--limit", "1", "test", "bench", hangs="pytest")
    assert status == 1
    assert outcomes(report)["test"] == "not finished: the time (1 s) was up"
    assert outcomes(report)["bench"] == "not finished: the time (1 s) was up"
    assert not any("benchmarks.gpu" in step for step in machine.steps()), "no time was left for it"


def test_unknown_steps_are_refused(machine: Machine) -> None:
    status, said = machine.run("tests")
    assert status == 2 and "expected steps of install, build, check, test and bench, got 'tests'" in said


def test_what_is_left_out_can_be_named_in_several_places() -> None:
    given = ["--without", "onnxruntime", "--without-cuda", "--without", "numpy", "cython"]
    assert gpu_wheels.parsed(given).without == ["onnxruntime", "numpy", "cython"]


def test_what_is_fetched() -> None:
    found = gpu_wheels.wanted("3.12", "x86_64", ["NumPy"])
    assert {"cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-crt", "trio", "cython", "pytest"} <= set(found)
    assert "numpy" not in found and "cffi" not in found, "left out, and for Windows alone"
    assert all(re.match(r"[\w.-]+==\S+ \\\n    --hash=sha256:", text) for text in found.values())
    less = gpu_wheels.wanted("3.12", "x86_64", [], cuda=False)
    assert set(gpu_wheels.wanted("3.12", "x86_64", [])) - set(less) >= {"cuda-bindings", "nvidia-cuda-nvrtc"}
    assert not [name for name in less if "cuda" in name] and "trio" in less
    with pytest.raises(SystemExit, match=r"'torch' is none of the packages: .*, trio,"):
        gpu_wheels.wanted("3.12", "x86_64", ["torch"])


def test_cuda_is_of_one_version() -> None:
    """Headers of one CUDA are read by the compiler of the same."""
    found = gpu_wheels.wanted("3.12", "x86_64", [])
    versions = {
        name: Version(found[name].split("==")[1].split()[0]).release[:2]
        for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt")
    }
    assert len(set(versions.values())) == 1, versions


def test_wheels_of_another_lock_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two versions of a package would stop the installation, which nobody could repair there."""
    monkeypatch.setattr(gpu_wheels, "wanted", lambda *_: {"trio": "trio==2.0 \\\n    --hash=sha256:00"})
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "--into", str(tmp_path)])
    asked: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        assert "trio==2.0" in Path(command[-1]).read_text()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "trio-1.0-py3-none-any.whl").touch()
    (tmp_path / "other-1.0-py3-none-any.whl").touch()
    assert gpu_wheels.main() == 1
    assert "no wheel came of trio" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "trio-2.0-py3-none-any.whl").write_bytes(bytes(2**20))
    assert gpu_wheels.main() == 0
    assert "1.0 MiB  1 wheels" in capsys.readouterr().out
    assert {"--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--require-hashes"} <= set(asked[1])
