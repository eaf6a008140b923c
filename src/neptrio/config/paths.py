"""Paths in configurations: where they may lead.

A configuration can arrive over the network, and what it names is opened, run or written with the server's rights. So a
path in it stays, links followed, inside the model's own folder, or inside a folder that
--backend-config=BACKEND,allowed-directory=FOLDERS names for all models of a backend (several: divided as in PATH).
"""

from __future__ import annotations

import os
from pathlib import Path

from neptrio.errors import InvalidArgument

KEY = "allowed-directory"


def within(folder: Path, name: str) -> Path | None:
    """The file that `name` means in `folder`, links followed; None when it is not inside of that folder."""
    if "\0" in name:
        return None
    folder = folder.resolve()
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder) else None


def allowed(
    name: str, base: Path, model_dir: Path, settings: dict[str, str], what: str, backend: str
) -> Path:
    """The file or folder that `name` means (relative to `base`, a folder of the model), links followed.

    `settings` are those of --backend-config for `backend`. Raises InvalidArgument, which begins with `what`, for a path
    that leads elsewhere than the module says.
    """
    given = [Path(folder) for folder in settings.get(KEY, "").split(os.pathsep) if folder]
    for folder in (model_dir, *given):
        path = within(folder, str(base / name)) if "\0" not in name else None
        if path is not None:
            return path
    raise InvalidArgument(
        f"{what}: '{name}' must lie in the model's folder, or in one that --backend-config={backend},{KEY}=FOLDER "
        "names"
    )
