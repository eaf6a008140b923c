"""requirements/ is what pyproject.toml allows, complete, with hashes; and how it is decided whether it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import install, lock

requirements = install.requirements

ENVIRONMENTS = [(python, machine) for python in install.PYTHONS for machine in install.MACHINES]
NAMES = [f"{python[0]}.{python[1]}-{machine}" for python, machine in ENVIRONMENTS]
HASH = re.compile(r"\n    --hash=sha256:[0-9a-f]{64}(?= \\\n|\n|\Z)")


def environment(python: tuple[int, int], machine: str) -> dict[str, str]:
    """The markers' variables on a Linux."""
    here = dict(default_environment())
    version = f"{python[0]}.{python[1]}"
    return here | {
        "python_version": version,
        "python_full_version": f"{version}.5",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def entries(group: str) -> dict[str, str]:
    return lock.entries((lock.FOLDER / f"{group}.txt").read_text())


def pinned(group: str, variables: dict[str, str]) -> dict[str, str]:
    """Name -> version of everything that is installed when a group has been, in such an environment."""
    found: dict[str, str] = {}
    for name in (*lock.BELOW[group], group):
        for head in entries(name):
            requirement = Requirement(head)
            if requirement.marker is None or requirement.marker.evaluate(variables):
                (pin,) = requirement.specifier
                assert pin.operator == "==", head
                version = found.setdefault(canonicalize_name(requirement.name), pin.version)
                assert version == pin.version, f"{requirement.name} has two versions"
    return found


@pytest.mark.parametrize(("python", "machine"), ENVIRONMENTS, ids=NAMES)
@pytest.mark.parametrize("group", lock.BELOW)
def test_what_is_locked_is_what_pyproject_allows(group: str, python: tuple[int, int], machine: str) -> None:
    """Whoever changes a range must run `make lock`, and nobody can change a file alone."""
    variables = environment(python, machine)
    found = pinned(group, variables)
    for text in requirements.wanted(group, gpu=False):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(variables):
            version = found.get(canonicalize_name(requirement.name))
            assert version is not None, f"requirements/{group}.txt lacks {text}: run `make lock`"
            assert requirement.specifier.contains(version, prereleases=True), (
                text,
                version,
                "run `make lock`",
            )


@pytest.mark.slow
@pytest.mark.parametrize("group", ["run", "test"])
def test_what_the_packages_require_is_locked_too(group: str) -> None:
    """pip is told to install the files alone, so nothing may be missing there."""
    variables = {**default_environment(), "extra": ""}
    found = pinned(group, dict(variables))
    checked = 0
    for name, version in found.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version != version:
            continue  # another version, installed with LOCK=no, may require something else
        for text in installed.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(variables):
                below = found.get(canonicalize_name(requirement.name))
                assert below is not None and requirement.specifier.contains(below, prereleases=True), (
                    name,
                    text,
                )
                checked += 1
    assert checked or metadata.version("trio") != found["trio"]


@pytest.mark.parametrize("group", lock.BELOW)
def test_every_package_has_hashes_and_no_place(group: str) -> None:
    text = (lock.FOLDER / f"{group}.txt").read_text()
    assert "//" not in text and "@" not in text and "--index" not in text
    found = entries(group)
    assert found
    for head, entry in found.items():
        hashes = HASH.findall(entry)
        assert hashes, head
        assert entry.replace(" \\\n", "\n") == head + "".join(hashes), f"{head} has more than hashes"
    assert "".join(text.split()) == "".join("".join(found.values()).split())


def test_no_other_file_is_in_the_folder() -> None:
    assert {file.stem for file in lock.FOLDER.glob("*.txt")} == set(lock.BELOW)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, ""),
        ({"machine": "aarch64", "python": (3, 14)}, ""),
        ({"wanted": "no"}, "LOCK=no"),
        ({"wanted": "yes"}, ""),
        ({"python": (3, 15)}, "it has nothing for Python 3.15"),
        ({"machine": "riscv64"}, "it has nothing for linux on riscv64 with glibc"),
        ({"libc": "musl"}, "it has nothing for linux on x86_64 with musl"),
        ({"system": "darwin", "machine": "arm64"}, "it has nothing for darwin on arm64 with glibc"),
    ],
)
def test_when_the_lock_is_used(given: dict[str, object], reason: str) -> None:
    usual = {"python": (3, 11), "system": "linux", "machine": "x86_64", "libc": "glibc"}
    assert install.not_locked(**{**usual, **given}) == reason  # type: ignore[arg-type]


def test_what_pip_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[list[str]] = []
    lines: list[str] = []
    statuses = [0, 0, 0, 1]

    def run(command: list[str], **options: str) -> subprocess.CompletedProcess[str]:
        told.append(command[len(install.PIP) :])
        lines.append(options.get("input", ""))
        return subprocess.CompletedProcess(command, statuses.pop(0))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(requirements, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["install.py", "run", "examples"])
    monkeypatch.setattr(install, "not_locked", lambda wanted: wanted and "because")
    monkeypatch.delenv("LOCK", raising=False)
    assert install.main() == 0
    for command, name in zip(told, ("run", "examples"), strict=True):
        assert command == [
            "--require-hashes", "--no-deps", "--only-binary=:all:", "-r", str(lock.FOLDER / f"{name}.txt"),
        ]  # fmt: skip
    assert capsys.readouterr().out == ""
    told.clear()
    monkeypatch.setenv("LOCK", "no")
    assert install.main() == 1
    assert told == [["-r", "/dev/stdin"], ["--no-deps", "-r", "/dev/stdin"]]
    assert any(line.startswith("trio>=") for line in lines[2].splitlines())
    printed = capsys.readouterr().out
    assert "requirements/ is not used (because)" in printed
    assert "the packages of 'examples' could not be installed" in printed


def test_a_machine_with_a_gpu_has_a_file_more() -> None:
    assert [file.name for file in install.files("run", True)] == ["run.txt", "cuda.txt"]
    assert [file.name for file in install.files("test", True)] == ["test.txt"]
