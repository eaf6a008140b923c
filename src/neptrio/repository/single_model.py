"""One model's folder given as a repository, which --model-name names.

A repository holds a folder for each model. KServe mounts whatever a storage URI names at /mnt/models, and that may be
the folder of one model: its config.pbtxt and version folders, or only its files (`model.onnx`). With --model-name the
server looks at each repository: one that is a model is served under that name; others are what they always were.

The choice is to make a repository out of links, because everything that reads models starts with a repository's
folder. The links lead to folders, so what is added to them later is seen; whether it is a model is decided once, at
the start. A name in its config.pbtxt is not the folder's, which nobody chose, so it does not count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

CONFIG = "config.pbtxt"


def is_model(folder: Path) -> bool:
    """Whether a folder is that of one model: it has a configuration, a version folder or a file `model.*`."""
    return os.path.isfile(folder / CONFIG) or bool(_versions(folder)) or _has_files(folder)


def _versions(folder: Path) -> list[Path]:
    """The version folders: numbers that are not models themselves."""
    with contextlib.suppress(OSError):
        return [
            entry
            for entry in folder.iterdir()
            if entry.name.isascii()
            and entry.name.isdigit()
            and os.path.isdir(entry)
            and not _is_repository_entry(entry)
        ]
    return []


def _is_repository_entry(folder: Path) -> bool:
    """A model whose name is a number, in a repository."""
    return os.path.isfile(folder / CONFIG) or any(
        entry.name.isascii() and entry.name.isdigit() and os.path.isdir(entry) for entry in folder.iterdir()
    )


def _has_files(folder: Path) -> bool:
    return any(os.path.isfile(entry) for entry in folder.glob("model.*"))


class SingleModel:
    """A repository of one model, made of links to `folder`. `repository` is its folder, `model` the one model's in it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.repository = Path(tempfile.mkdtemp(prefix="neptrio-single-"))
        # links are followed from where they lie
        real = folder.absolute()
        self.model = model = self.repository / name
        if _versions(folder):
            model.symlink_to(real)
            return
        model.mkdir()
        for entry in real.iterdir():  # labels, warm-up data and the configuration are looked for here
            (model / entry.name).symlink_to(entry)
        (model / "1").symlink_to(real)

    def close(self) -> None:
        """Removes the links."""
        shutil.rmtree(self.repository, ignore_errors=True)
