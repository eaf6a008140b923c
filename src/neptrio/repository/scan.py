"""Reads a model repository: model folders, their version folders, and whether they have changed.

Symbolic links may lead anywhere inside the repositories (a mounted ConfigMap, versions that share files), but not
out of them: someone who can write to a repository must not make the server read, show or execute files
elsewhere. --follow-external-links=true lifts that.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from neptrio.config import version_labels
from neptrio.errors import InvalidArgument

# relative path -> (mtime in ns, size) of a file, (0, -1) of a folder, (0, -2) of a link to nothing
Fingerprint = Mapping[str, tuple[int, int]]
DUPLICATE = "model appears in two or more repositories"
DEEPEST = 32  # levels of folders below a model's; links may lead in circles


def names(repository: Path) -> list[str]:
    """The names of a repository's model folders, in no order. Raises InvalidArgument."""
    try:
        with os.scandir(repository) as entries:
            return [entry.name for entry in entries if entry.name[0] != "." and _folder(entry)]
    except OSError as error:
        raise _unreadable(repository, error) from None


def folders_of(name: str, repositories: tuple[Path, ...]) -> list[Path]:
    """The folders of one model, over all repositories, without listing what else they have. Raises InvalidArgument."""
    found = []
    for repository in dict.fromkeys(repositories):
        folder = repository / name
        if _may_be_model(name) and os.path.isdir(folder):  # False for a name that no file can have, too
            found.append(folder)
        elif not os.path.isdir(repository):
            raise _unreadable(repository)
    return found


def _may_be_model(name: str) -> bool:
    """Whether a folder of a repository may have that name, which may be anything that a client sent."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name


def _unreadable(repository: Path, error: OSError | None = None) -> InvalidArgument:
    """The error for a repository; its message says why, if need be by another look."""
    try:
        if error is None:
            os.stat(repository)
    except OSError as found:
        error = found
    missing = error is None or isinstance(error, (FileNotFoundError, NotADirectoryError))
    why = ("it is a file" if os.path.isfile(repository) else "no such folder") if missing else error
    return InvalidArgument(f"failed to open model repository '{repository}': {why}")


def _folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; what a folder's own listing says is asked nobody else."""
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or to where the server may not look
        return False


def model_dirs(repositories: tuple[Path, ...]) -> dict[str, list[Path]]:
    """Model name -> the folders of that name, over all repositories, sorted by name. Raises InvalidArgument."""
    found: dict[str, list[Path]] = {}
    for repository in dict.fromkeys(repositories):
        for name in names(repository):
            found.setdefault(name, []).append(repository / name)
    return dict(sorted(found.items()))


def versions(model_dir: Path) -> list[int]:
    """The version numbers in a model's folder, ascending; other names are ignored, and numbers that no request can name."""
    found = []
    for entry in model_dir.iterdir():
        name = entry.name
        if name.isascii() and name.isdigit() and not (len(name) > 1 and name[0] == "0") and entry.is_dir():
            found.append(int(name))
    return sorted(number for number in found if number < version_labels.HIGHEST)


def real(folders: Iterable[Path]) -> tuple[str, ...]:
    """The folders' paths with all links resolved."""
    return tuple(os.path.realpath(folder) for folder in folders)


def _inside(path: str, allowed: tuple[str, ...] | None) -> bool:
    if allowed is None:
        return True
    real = os.path.realpath(path)
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in allowed)


# what calls itself is no function inside another one: that would refer to itself, and live until the collector finds it
def leading_out(model_dir: Path, allowed: tuple[str, ...] | None) -> list[Path]:
    """The symbolic links in a model's folder, or the folder itself, that lead out of the folders `allowed`."""
    if allowed is None:
        return []
    if not _inside(str(model_dir), allowed):
        return [model_dir]
    found: list[Path] = []
    _find_leading_out(str(model_dir), 0, allowed, found)
    return found


INTERPRETERS = (
    "python",
    "\N{MATHEMATICAL ITALIC SMALL PI}thon",
)  # the second is a name that venv of Python 3.14 adds


def _find_leading_out(folder: str, depth: int, allowed: tuple[str, ...], found: list[Path]) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.is_symlink() and not _inside(entry.path, allowed):
                if _interpreter(folder, entry.name):
                    continue
                found.append(Path(entry.path))
            elif entry.is_dir() and depth < DEEPEST:
                _find_leading_out(entry.path, depth + 1, allowed, found)


def _interpreter(folder: str, name: str) -> bool:
    """True for a link to the interpreter in a virtual environment inside a model's folder."""
    return (
        name.startswith(INTERPRETERS)
        and os.path.basename(folder) == "bin"
        and os.path.isfile(os.path.join(os.path.dirname(folder), "pyvenv.cfg"))
    )


def link_text(link: Path) -> str:
    """Why such a link is refused, for an error message."""
    return (
        f"the symbolic link leads out of the repository, to {os.path.realpath(link)}; put the files themselves there, "
        "or start the server with --follow-external-links=true"
    )


def fingerprint(model_dir: Path, allowed: tuple[str, ...] | None = None) -> dict[str, tuple[int, int]]:
    """The folder's state, to be compared with an earlier one; compiled Python files beside sources are ignored.

    Any difference is a change, also an older file copied over a newer one. Folders outside `allowed` are not
    looked into.
    """
    found: dict[str, tuple[int, int]] = {}
    _take_fingerprints(str(model_dir), "", 0, allowed, found)
    return found


def _take_fingerprints(
    folder: str, below: str, depth: int, allowed: tuple[str, ...] | None, found: dict[str, tuple[int, int]]
) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            name = f"{below}{entry.name}"
            try:
                info = entry.stat()
            except OSError:  # a link to nothing, or deleted meanwhile
                found[name] = (0, -2)
                continue
            if stat.S_ISDIR(info.st_mode):
                found[name + "/"] = (0, -1)
                if depth < DEEPEST and (not entry.is_symlink() or _inside(entry.path, allowed)):
                    _take_fingerprints(entry.path, name + "/", depth + 1, allowed, found)
            else:
                found[name] = (info.st_mtime_ns, info.st_size)


def digest(state: Fingerprint) -> str:
    """A text that two states of a folder have in common only if they are the same."""
    text = "\0".join(f"{name}\0{time}\0{size}" for name, (time, size) in sorted(state.items()))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def wanted(config: object, available: list[int]) -> list[int]:
    """The versions that config.version_policy selects among those available."""
    policy = config.version_policy  # type: ignore[attr-defined]
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return available
    if choice == "specific":
        return [v for v in available if v in set(policy.specific.versions)]
    count = policy.latest.num_versions or 1
    return available[-count:]
