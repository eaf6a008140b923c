"""Functions to load and unload models, and to ask whether one is ready."""

from __future__ import annotations

from . import _host


def load_model(model_name: str, files: dict[str, bytes] | None = None, config: str = "") -> None:
    """Loads or reloads a model and waits until it serves (model control mode "explicit").

    `config` is a JSON configuration that replaces the one in the repository; `files` maps
    "file:<version>/<name>" to contents. Raises TritonModelException.
    """
    _host.require("load_model").load_model(model_name, dict(files or {}), config)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model and waits until that is done (model control mode "explicit"). Raises TritonModelException.

    A model may unload itself; the call then returns before it is unloaded.
    """
    _host.require("unload_model").unload_model(model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """True when the model (its latest version by default) can be used now."""
    return _host.require("is_model_ready").is_model_ready(model_name, str(model_version))
