"""Finds the backend of a model.

Rules:
 1. A name is looked up among the built-in backends, then as a compiled library and a model.py in the model's folders and in
    --backend-directory, then among the backends that installed packages bring (backends.packages), then as a compiled library
    in the folders that need no flag. A folder that a flag names is more of a decision than a package that is there, and
    than those of ours that only try things out.
 2. Whatever is wrong with a backend, the start, `neptrio check` and a load call say it in the same words: those that
    find_for() raises.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from neptrio.backends import elsewhere, packages
from neptrio.backends.compiled import find as compiled
from neptrio.backends.ensemble import EnsembleBackend
from neptrio.config.isolation import parameter
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
TRYING_OUT = ("identity", "sequence")


def find_for(config: Any, settings: Settings, folders: Sequence[Path] = ()) -> type[Backend]:
    """The backend class for a configuration; ensembles have their own. Raises InvalidArgument.

    `folders` are the model's own, in the order in which they are searched for the library of a compiled backend.
    """
    if config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
        return EnsembleBackend
    name, library = config.backend, None
    asked = compiled.asked_for(config, settings)
    if (name not in BUILT_IN or asked) and config.runtime != "model.py":
        library = compiled.named(config, folders, settings)
    if library is None and asked:
        library = compiled.by_default(config)
        if library is None:
            raise InvalidArgument(
                f"unable to find backend library '{compiled.file_name(config)}' for backend '{name}', which is asked for by "
                "'compiled': put it into the model's folder, or into a folder of that name in --backend-directory"
            )
    if library is None:
        try:
            return find(name, settings, bool(parameter(config, "EXECUTION_ENV_PATH")))
        except InvalidArgument:
            library = compiled.by_default(config)
            if library is None:
                raise
    from neptrio.backends.compiled.backend import CompiledBackend

    return CompiledBackend.opening(library)


def check_runtime(config: Any, backend: type[Backend]) -> None:
    """Raises InvalidArgument when the field `runtime` does not fit the configuration's backend.

    It names the library of a compiled backend. For others it may name the library file that a Triton server has, and
    nothing else: any other file or path would promise that code is run which is not.
    """
    runtime, name = config.runtime, config.name
    library = getattr(backend, "library", None)
    fits = f"libtriton_{config.backend}.so" if config.backend in BUILT_IN else "model.py"
    if library is not None:
        fits = library.name
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


def find(name: str, settings: Settings, environment: bool = False) -> type[Backend]:
    """The backend class of that name, compiled ones aside. Raises InvalidArgument when there is none.

    Besides the built-in backends, each folder <--backend-directory>/<name> with a model.py is one, and each that an
    installed package brings. `environment`: its models have an environment of their own, so that what it imports need not
    be installed in the server's.
    """
    target, file = BUILT_IN.get(name), None
    if target is None or name in TRYING_OUT:
        file = _in_directory(name, settings)
    if target is not None and file is None:
        module, _, attribute = target.partition(":")
        found: type[Backend] = getattr(import_module(module), attribute)
        return found
    if file is None:
        entry = packages.find(name)
        if entry is None and (way := elsewhere.way(name)):
            raise InvalidArgument(way)
        if entry is None:
            near = difflib.get_close_matches(name, names(), 1, 0.5)
            meant = f"did you mean '{near[0]}'? " if near else ""
            raise InvalidArgument(
                f"unable to find backend library for backend '{name}', try specifying runtime on the model "
                f"configuration. ({meant}This server has {', '.join(names())}; --backend-directory=DIR adds those in "
                f"DIR/NAME, each a model.py or a libtriton_NAME.so)"
            )
        file = packages.model_file(entry)
        if not environment:
            packages.check_imports(entry, file)
    from neptrio.backends.python import PythonBackend

    return PythonBackend.based_on(file)


def _in_directory(name: str, settings: Settings) -> Path | None:
    """The model.py of a backend in --backend-directory, None when there is none."""
    directory = settings.backend_directory
    if directory is None or name in ("", "..") or Path(name).name != name:
        return None
    file = directory / name / "model.py"
    return file if file.is_file() else None


def names() -> list[str]:
    """The names of the backends that need no flag: built in, and of installed packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in packages.installed())})
