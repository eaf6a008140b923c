"""What to type where an optional package is missing.

The problem: `pip install 'neptrio[onnx]'` asks an index for a name that may be nobody's, or a stranger's, while this package
comes from a file or a clone. So messages name the packages that the extra stands for, whose names have owners.
"""

from __future__ import annotations

import re
from importlib import metadata

OWN = "neptrio"
_NAMED = re.compile(rf"{OWN}\[([\w,-]+)\]")


def install(extra: str) -> str:
    """The command that installs the packages of an extra of this package."""
    return "pip install " + (" ".join(f"'{what}'" for what in packages(extra)) or f"'{OWN}[{extra}]'")


def packages(extra: str) -> list[str]:
    """The requirements of an extra, without their markers; extras that it names are taken apart."""
    try:
        lines = metadata.requires(OWN) or []
    except metadata.PackageNotFoundError:  # run from a folder that nobody has installed
        lines = []
    found: list[str] = []
    for line in lines:
        what, _, marker = (part.strip() for part in line.partition(";"))
        if f'extra == "{extra}"' not in marker and f"extra == '{extra}'" not in marker:
            continue
        named = _NAMED.match(what)
        found += [one for more in named[1].split(",") for one in packages(more)] if named else [what]
    return found
