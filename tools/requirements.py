"""Prints requirements of pyproject.toml, one per line.

    python tools/requirements.py run|test|EXTRA

`run` is what building and running need: the build system's requirements, the dependencies and, on a
machine with an NVIDIA driver, the extra `cuda`. `test` adds what the tests need; any other word is an
extra. An extra that names another one of the project's own is printed with what that one holds.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
project = pyproject["project"]
extras = project["optional-dependencies"]


def expanded(requirements: list[str]) -> list[str]:
    """The requirements with the project's own extras replaced by what they hold."""
    found: list[str] = []
    for requirement in requirements:
        own = re.fullmatch(rf"{project['name']}\[([\w-]+)\]", requirement)
        found += expanded(extras[own[1]]) if own else [requirement]
    return found


def wanted(what: str) -> list[str]:
    """The requirements that a word stands for. Raises KeyError for an unknown extra."""
    if what == "run":
        cuda = extras["cuda"] if Path("/proc/driver/nvidia/version").exists() else []
        return [*pyproject["build-system"]["requires"], "wheel", *project["dependencies"], *cuda]
    return [*wanted("run"), *extras["test"]] if what == "test" else list(extras[what])


print("\n".join(expanded(wanted(sys.argv[1]))))
