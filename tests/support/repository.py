"""Model repositories for tests."""

from __future__ import annotations

from pathlib import Path


def write_model(
    repository: Path,
    name: str,
    config: str,
    files: dict[str, str | bytes] | None = None,
    versions: tuple[int, ...] = (1,),
) -> Path:
    """Creates a model folder with config.pbtxt, version folders and `files` (path -> content)."""
    folder = repository / name
    for version in versions:
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    for path, content in (files or {}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            target.write_text(content)
        else:
            target.write_bytes(content)
    return folder


def identity_config(
    datatype: str = "TYPE_INT32", dims: str = "16", max_batch_size: int = 8, pairs: int = 2, extra: str = ""
) -> str:
    """An identity model: INPUT<i> -> OUTPUT<i>."""
    inputs = ",".join(f'{{ name: "INPUT{i}" data_type: {datatype} dims: [ {dims} ] }}' for i in range(pairs))
    outputs = ",".join(
        f'{{ name: "OUTPUT{i}" data_type: {datatype} dims: [ {dims} ] }}' for i in range(pairs)
    )
    return f'backend: "identity" max_batch_size: {max_batch_size} input [ {inputs} ] output [ {outputs} ] {extra}'
