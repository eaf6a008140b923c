"""Which requirements of pyproject.toml stand for what `make` installs. Prints them, one per line.

    python tools/requirements.py run|test|EXTRA

`run` is what building and running need: the build system's requirements, the dependencies, the extra `onnx` and, on
a machine with an NVIDIA driver, the extra `cuda`. `test` adds what the tests need; any other word is an
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


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists()


def expanded(requirements: list[str]) -> list[str]:
    """The requirements with the project's own extras replaced by what they hold."""
    found: list[str] = []
    for requirement in requirements:
        own = re.fullmatch(rf"{project['name']}\[([\w-]+)\]", requirement)
        found += expanded(extras[own[1]]) if own else [requirement]
    return found


def wanted(what: str, gpu: bool | None = None) -> list[str]:
    """The requirements that a word stands for. Raises KeyError for an unknown extra.

    `gpu` says whether `run` has the extra `cuda`; None: as this machine has a driver.
    """
    if what == "run":
        cuda = extras["cuda"] if (has_gpu() if gpu is None else gpu) else []
        return expanded(
            [
                *pyproject["build-system"]["requires"],
                "wheel",
                *project["dependencies"],
                *extras["onnx"],
                *cuda,
            ]
        )
    return expanded([*wanted("run", gpu), *extras["test"]] if what == "test" else list(extras[what]))


if __name__ == "__main__":
    print("\n".join(wanted(sys.argv[1])))
