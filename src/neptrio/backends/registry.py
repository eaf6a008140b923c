"""Finds the backend of a model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from neptrio.backends.ensemble import EnsembleBackend
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend
from neptrio.settings import Settings

# backend name -> "module:class"; the module is imported when the first model needs it
BUILT_IN = {
    "identity": "neptrio.backends.identity:IdentityBackend",
    "kernel": "neptrio.backends.kernel.backend:KernelBackend",
    "onnxruntime": "neptrio.backends.onnx.backend:OnnxBackend",
    "sequence": "neptrio.backends.sequence:SequenceBackend",
    "python": "neptrio.backends.python:PythonBackend",
}


def find_for(config: Any, settings: Settings) -> type[Backend]:
    """The backend class for a configuration; ensembles have their own. Raises InvalidArgument."""
    if config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
        return EnsembleBackend
    return find(config.backend, settings)


def check_runtime(config: Any) -> None:
    """Raises InvalidArgument when the field `runtime` does not fit the configuration's backend.

    It may name the backend's library file as for a Triton server, and nothing else: any other file or path would
    promise that code is run which is not.
    """
    runtime, name = config.runtime, config.name
    fits = f"libtriton_{config.backend}.so" if config.backend in BUILT_IN else "model.py"
    if runtime in ("", fits) or not config.backend:
        return
    if "/" in runtime or runtime in ("..", "."):
        raise InvalidArgument(
            f"runtime '{runtime}' of model '{name}' must be the name of a file in the folder of backend "
            f"'{config.backend}', not a path; leave it out, or say '{fits}'"
        )
    raise InvalidArgument(
        f"unable to find backend library '{runtime}' for model '{name}': backend '{config.backend}' has '{fits}'; "
        "leave runtime out, or say that"
    )


def find(name: str, settings: Settings) -> type[Backend]:
    """The backend class of that name. Raises InvalidArgument when there is none.

    Besides the built-in backends, each folder <--backend-directory>/<name> with a model.py is one.
    """
    target = BUILT_IN.get(name)
    if target is None:
        directory = settings.backend_directory
        if directory is not None and name and Path(name).name == name:
            file = directory / name / "model.py"
            if file.is_file():
                from neptrio.backends.python import PythonBackend

                return PythonBackend.based_on(file)
        raise InvalidArgument(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model "
            "configuration."
        )
    module, _, attribute = target.partition(":")
    found: type[Backend] = getattr(import_module(module), attribute)
    return found
