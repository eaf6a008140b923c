"""Prints requirements of pyproject.toml, one per line.

Without an argument: the dependencies and the test extra. With the name of an extra: that extra.
An extra that names another one of the project's own is printed with what that one holds.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]


def expanded(requirements: list[str]) -> list[str]:
    """The requirements with the project's own extras replaced by what they hold."""
    found: list[str] = []
    for requirement in requirements:
        own = re.fullmatch(rf"{project['name']}\[([\w-]+)\]", requirement)
        found += expanded(extras[own[1]]) if own else [requirement]
    return found


wanted = extras[sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"] + extras["test"]
print("\n".join(expanded(wanted)))
