"""Backends that installed packages bring: the entry point group `neptrio.backends`.

The problem: a format such as a tree ensemble needs a library that the server does not, and whoever has the library is to
have the backend, without a folder of files to copy and a flag that names it. The choice: a backend is a folder with a
model.py, as one of --backend-directory is, and an entry point tells where an installed package has it:

    [project.entry-points."neptrio.backends"]
    scale = "neptrio_scale"

Rules:
 1. Nothing of the package is imported here: its code runs in the processes of its models only.
 2. What is installed while the server runs is found by the next load, and what is removed is not found any more.
 3. Two packages that bring the same name are refused, both named: which of them was meant, nobody knows.
 4. What model.py imports at its top and is not there is told before anything runs, with what to install: the package, or
    that extra of it which asks for what is missing. That is decided here, so that the start, `neptrio check` and a load
    call say it in the same words.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from neptrio import extras as own_extras
from neptrio.backends.python import examine
from neptrio.errors import InvalidArgument
from neptrio.foreign import summary

GROUP = "neptrio.backends"
# a requirement of an extra: `treelite<5,>=4.4; extra == "trees"`
REQUIRED = re.compile(r"""([\w.-]+).*;.*\bextra\s*==\s*["']([\w.-]+)["']""")


@dataclass(frozen=True)
class Entry:
    """An entry point of the group: a backend that an installed package brings."""

    name: str
    module: str
    distribution: str
    # (what is required, the extra that requires it), of those extras that the package has
    required: tuple[tuple[str, str], ...] = ()

    def install(self, missing: list[str]) -> str:
        """The command that installs what is missing, top-level modules."""
        asking = {extra for name in missing for what, extra in self.required[::-1] if what == name.lower()}
        # where several extras ask for it, the one that is called like the backend
        extras = {self.name} if self.name in asking else asking
        if self.distribution == own_extras.OWN and extras:
            return own_extras.install(sorted(extras)[0])
        wanted = self.distribution + (f"[{','.join(sorted(extras))}]" if extras else "")
        return f"pip install '{wanted}'"


def installed() -> tuple[Entry, ...]:
    """All backends of installed packages, sorted by name."""
    return _installed(tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int:
    """When something was last installed into a folder of sys.path; 0 where that cannot be known."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


# the metadata of a hundred packages takes tens of milliseconds to read, and a repository may have hundreds of models
@lru_cache(maxsize=2)
def _installed(folders: tuple[tuple[str, int], ...]) -> tuple[Entry, ...]:
    found = {_entry(point) for point in metadata.entry_points(group=GROUP)}
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.distribution, entry.module)))


def _entry(point: metadata.EntryPoint) -> Entry:
    # not point.module, which raises where a package has written something else than a name
    module = re.split(r"[:\[]", point.value)[0].strip()
    distribution = point.dist
    if distribution is None:
        return Entry(point.name, module, module.partition(".")[0])
    required = [REQUIRED.match(line) for line in distribution.requires or ()]
    return Entry(
        point.name,
        module,
        distribution.name,
        tuple((found[1].lower().replace("-", "_"), found[2]) for found in required if found is not None),
    )


def find(name: str) -> Entry | None:
    """The installed backend of that name, None when there is none. Raises InvalidArgument when there are several."""
    found = [entry for entry in installed() if entry.name == name]
    if len(found) > 1:
        who = " and ".join(sorted({entry.distribution for entry in found}))
        raise InvalidArgument(
            f"backend '{name}' is brought by several installed packages ({who}): uninstall all but one, or put the "
            f"wanted one's folder as '{name}' into the folder of --backend-directory"
        )
    return found[0] if found else None


def model_file(entry: Entry) -> Path:
    """The model.py of an installed backend. Raises InvalidArgument when its package has none where it says."""
    for folder in _folders(entry):
        file = Path(folder) / "model.py"
        if file.is_file():
            return file
    raise InvalidArgument(
        f"package '{entry.distribution}' says that backend '{entry.name}' is in '{entry.module}', and there is no "
        "model.py in it; install the package anew"
    )


def _folders(entry: Entry) -> list[str]:
    """The folders of the entry's package. No package is imported for that, parents included (rule 1)."""
    top, *rest = entry.module.split(".")
    try:
        spec = find_spec(top)
        name = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return []
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            f"backend '{entry.name}' of package '{entry.distribution}' cannot be found: {summary(error)}"
        ) from None
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def check_imports(entry: Entry, file: Path) -> None:
    """Raises InvalidArgument when something that model.py imports at its top is not installed."""
    missing = examine.missing_imports(file)
    if missing:
        names = " and ".join(f"'{name}'" for name in missing)
        raise InvalidArgument(
            f"backend '{entry.name}' needs {names}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{entry.install(missing)}"
        )
