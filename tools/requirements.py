"""Prints requirements of pyproject.toml, one per line.

Without an argument: the dependencies and the test extra. With the name of an extra: that extra.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = extras[sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"] + extras["test"]
print("\n".join(wanted))
