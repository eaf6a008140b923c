"""Functions to load and unload models, to ask whether one is ready, and to tell what memory a model holds."""

from __future__ import annotations

from typing import Any

from . import _checks, _host
from ._errors import TritonModelException

# what the server takes (backends/python/isolated.py)
_MEMORY = ("GPU", "CPU_PINNED")
_DEVICES = 1024
_ROWS = 64


def get_model_dir() -> str:
    """The folder of the model's version, with its file. Raises TritonModelException outside a server."""
    host = _host.find()
    folder = (host.model_dir if host is not None else "") or _host.completing.get()
    if not folder:
        raise TritonModelException("get_model_dir needs a running server; this process is none")
    return folder


def holds_memory(rows: list[tuple[str, int, int]]) -> None:
    """Tells the server what this process holds besides ordinary memory, for `memory_usage` of the statistics.

    `rows`: (type, number of the device, bytes) with the type "GPU" or "CPU_PINNED"; they replace what was told before. Without
    effect in the server's process and outside of a server. Raises ValueError.
    """
    told = []
    for row in rows:
        try:
            kind, device, size = row
            told.append((str(kind), int(device), int(size)))
        except (TypeError, ValueError):
            raise ValueError(f"memory must be (type, device, bytes), got {row!r}") from None
        if kind not in _MEMORY or not (0 <= device < _DEVICES and 0 <= size < 1 << 62):
            raise ValueError(
                f"memory must be of a type {' or '.join(_MEMORY)}, a device and bytes, got {row!r}"
            )
    if len(told) > _ROWS:
        raise ValueError(f"memory of at most {_ROWS} devices can be told, got {len(told)} rows")
    host = _host.find()
    if host is not None:
        host.holds_memory(told)


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads or reloads a model and waits until it serves (model control mode "explicit").

    `config` is a JSON configuration that replaces the one in the repository; `files` maps
    "file:<version>/<name>" to contents. Raises TritonModelException.
    """
    name = _checks.text(model_name, "model_name of load_model()")
    config = _checks.text(config, "config of load_model()")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
        )
    made = dict(_file(*row) for row in (files or {}).items())
    _host.require("load_model").load_model(name, made, config)


def _file(path: Any, content: Any) -> tuple[str, bytes]:
    if not isinstance(content, (bytes, bytearray)):
        raise _checks.wrong("a file's content in load_model()", "bytes", content)
    return _checks.text(path, "a file's path in load_model()"), bytes(content)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model and waits until that is done (model control mode "explicit"). Raises TritonModelException.

    A model may unload itself; the call then returns before it is unloaded.
    """
    name = _checks.text(model_name, "model_name of unload_model()")
    _host.require("unload_model").unload_model(name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """True when the model (its latest version by default) can be used now."""
    name = _checks.text(model_name, "model_name of is_model_ready()")
    version = _checks.text(model_version, "model_version of is_model_ready()")
    return _host.require("is_model_ready").is_model_ready(name, version)
