"""The parameters of a load call: a configuration, files, or both; labels of versions to be set with it.

Their form is that of docs/protocol/model-repository-extension.md. Files are written to a temporary folder, which
replaces the model's folder and exists for as long as a model loaded from it. Nothing is ever written outside that
folder: a path is taken as relative to it, and must be without `..` and without names that a file system refuses.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neptrio.codec.base64_text import decode_base64
from neptrio.config import version_labels
from neptrio.config.validate_config import LONGEST_NAME
from neptrio.errors import Internal, InvalidArgument
from neptrio.limits import LONGEST_NAME as LONGEST_PATH
from neptrio.limits import shown
from neptrio.repository.model_names import Change

FILE = "file:"
MOST_FOLDERS = 32  # of a path, one in the other


class Folder:
    """The temporary folder of a file override; removed when nobody holds it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="neptrio-model-"))
        self.holders = 0

    def hold(self) -> None:
        """One more holder uses the folder."""
        self.holders += 1

    def release(self) -> None:
        """One holder less; the last one removes the folder."""
        self.holders -= 1
        if self.holders <= 0:
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class LoadParameters:
    """The parameters of a load call, and the repository that it names. `config` is None when none was given."""

    config: str | None = None
    files: Mapping[str, bytes | str] = field(default_factory=dict)  # path -> content, str = base64
    return_at_once: bool = False
    repository: str = ""  # what the client calls the repository to load from; "": any
    names: Change = field(default_factory=Change)  # labels to be set with the load
    check_reach: Callable[[str], None] | None = None  # raises Denied for a name that is not for who asks

    @property
    def overrides(self) -> bool:
        """True when the model's own folder is not used as it is."""
        return self.config is not None or bool(self.files)


def parse(
    parameters: Mapping[str, Any], repository: str = "", check_reach: Callable[[str], None] | None = None
) -> LoadParameters:
    """Checks the types of a load call's parameters. `file:` values are bytes or base64 text.

    Raises InvalidArgument, or Internal for an unknown parameter (docs/protocol/rules.md E4.2).
    """
    config: str | None = None
    files: dict[str, bytes | str] = {}
    at_once = False
    labels: dict[str, int | None] = {}
    for key, value in parameters.items():
        if key == "config":
            config = _text(key, value)
        elif key.startswith(FILE):
            if not isinstance(value, (str, bytes)):
                raise InvalidArgument(
                    f"Unable to parse '{shown(key)}': attempt to access JSON non-string as string"
                )
            files[key.removeprefix(FILE)] = value
        elif key == "async":
            if not isinstance(value, bool):
                raise InvalidArgument(
                    "Unable to parse 'async': attempt to access JSON non-boolean as boolean"
                )
            at_once = value
        elif key == version_labels.LABELS:
            text = _text(key, value)
            labels = version_labels.parse_labels(text, f"load parameter '{key}'", removing=True)
        else:
            raise Internal(
                f"unexpected error on creating Triton parameter: unknown load parameter '{shown(key)}', expected "
                f"config, {FILE}<version>/<file name>, {version_labels.LABELS} or async"
            )
    return LoadParameters(config, files, at_once, repository, Change(labels), check_reach)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"Unable to parse '{key}': attempt to access JSON non-string as string")
    return value


def decode(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """The files' contents. Raises InvalidArgument naming the parameter whose base64 is broken."""
    decoded: dict[str, bytes] = {}
    for path, value in files.items():
        if isinstance(value, str):
            try:
                decoded[path] = decode_base64(value)
            except ValueError as error:
                raise InvalidArgument(
                    f"load parameter '{FILE}{shown(path)}' is not valid base64: {error}"
                ) from None
        else:
            decoded[path] = value
    return decoded


def parts_of(path: str) -> tuple[str, ...]:
    """The components of a `file:` path. Raises InvalidArgument when it could leave the folder."""
    if len(path) > LONGEST_PATH or path.count("/") > MOST_FOLDERS:
        raise InvalidArgument(
            f"'{FILE}{shown(path)}': a path may have {LONGEST_PATH} characters and {MOST_FOLDERS} folders, this one has "
            f"{len(path)} and {path.count('/')}"
        )
    parts = tuple(path.split("/"))
    if not path or "\0" in path or "\\" in path or any(part in ("", ".") for part in parts):
        raise InvalidArgument(f"'{FILE}{shown(path)}': expected {FILE}<version>/<file name>")
    if ".." in parts:
        raise InvalidArgument(f"'{FILE}{shown(path)}': must stay within model directory")
    for part in parts:
        if len(part.encode("utf-8", "surrogatepass")) > LONGEST_NAME:
            raise InvalidArgument(f"'{FILE}{shown(path, 40)}': a name is longer than {LONGEST_NAME} bytes")
    return parts


def plain(path: str) -> str:
    """A path of a load call without what says nothing: `/1/model.py`, `./1/model.py` and `1//model.py` are one file."""
    head, slash, name = path.rpartition("/")
    return "/".join([*(part for part in head.split("/") if part not in ("", ".")), name]) if slash else path


def write(files: Mapping[str, bytes]) -> Folder:
    """A new temporary folder with these files. Raises InvalidArgument or OSError and then leaves nothing behind."""
    given: dict[tuple[str, ...], str] = {}
    places = []
    for path, content in files.items():
        parts = parts_of(plain(path))
        if parts in given:
            raise InvalidArgument(
                f"'{FILE}{shown(path)}' and '{FILE}{shown(given[parts])}' are the same file: expected each file once"
            )
        given[parts] = path
        places.append((parts, content))
    folder = Folder()
    try:
        for parts, content in places:
            target = folder.path.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except (OSError, ValueError) as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise InvalidArgument(f"the files of the load call cannot be written: {error}") from None
    return folder
