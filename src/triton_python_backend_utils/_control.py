"""Functions to load and unload models, and to ask whether one is ready."""

from __future__ import annotations

from typing import Any

from . import _checks, _host
from ._errors import TritonModelException


def get_model_dir() -> str:
    """The folder of the model's version, with its file. Raises TritonModelException outside a server."""
    host = _host.find()
    folder = (host.model_dir if host is not None else "") or _host.completing.get()
    if not folder:
        raise TritonModelException("get_model_dir needs a running server; this process is none")
    return folder


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
