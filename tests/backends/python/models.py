"""Configurations and model files for the Python backend's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.repository import write_model

HEAD = "import triton_python_backend_utils as pb_utils\n"


def config(
    inputs: str = "IN:TYPE_FP32:-1",
    outputs: str = "OUT:TYPE_FP32:-1",
    max_batch_size: int = 0,
    extra: str = "",
) -> str:
    """A config.pbtxt; tensors are "NAME:TYPE:DIMS" separated by blanks, DIMS by commas."""

    def rows(text: str) -> str:
        made = []
        for row in text.split():
            name, kind, dims = row.split(":")
            made.append(f'{{ name: "{name}" data_type: {kind} dims: [ {dims} ] }}')
        return ", ".join(made)

    return (
        f'backend: "python" max_batch_size: {max_batch_size} input [ {rows(inputs)} ] '
        f"output [ {rows(outputs)} ] {extra}"
    )


def python_model(
    repository: Path,
    name: str,
    code: str,
    text: str | None = None,
    files: dict[str, str | bytes] | None = None,
) -> Path:
    """A model folder with version 1 whose model.py is `code` (with the usual import in front)."""
    return write_model(
        repository, name, config() if text is None else text, {"1/model.py": HEAD + code, **(files or {})}
    )


ISOLATION = ' parameters {{ key: "isolation" value: {{ string_value: "{}" }} }}'
ENVIRONMENT = ' parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{}" }} }}'


def isolated(
    repository: Path, name: str, code: str, text: str | None = None, way: str = "process", **more: Any
) -> Path:
    """A model folder as of python_model(), whose model says where it runs: `way` is "process", "none", or the path of
    an environment with an interpreter of its own."""
    text = config() if text is None else text
    said = (ENVIRONMENT if way.startswith("/") else ISOLATION).format(way)
    return python_model(repository, name, code, text + said, **more)
