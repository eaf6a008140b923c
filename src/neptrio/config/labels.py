"""Label files: the names of an output's classes, one a line, for the classification extension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neptrio.errors import InvalidArgument


def read(model_dir: Path, config: Any) -> dict[str, list[bytes]]:
    """Output name -> its labels by index, in UTF-8; outputs without label_filename are left out."""
    return {
        output.name: [label.encode() for label in read_file(model_dir / output.label_filename, output.name)]
        for output in config.output
        if output.label_filename
    }


def read_file(path: Path, output: str) -> list[str]:
    """The labels of one file, one a line, with the blanks that it has. Raises InvalidArgument when it cannot be read."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"labels of output '{output}' cannot be read: {path}: {error}") from None
    if not lines[-1]:  # behind the last line's end
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
