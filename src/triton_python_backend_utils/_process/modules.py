"""Loads a model's file in a process of its own, so that Python itself finds what lies beside it.

The problem: a model's helper modules lie beside model.py and in the model's folder, and not only `import` statements look
for them: import_module(), unpickling, hydra, logging.config, importlib.resources and the workers of a spawned pool know
nothing but sys.path and a module's name. The choice: as on a Triton server the version folder and the model's folder are on
sys.path, and the module is called VERSION.model. The process has one model, so nobody else sees them.

Rules:
 1. The two folders come behind Python's own modules, which everything relies on, and before installed packages.
 2. What lies in them is compiled from source at each load; cached bytecode is neither read nor written.
 3. The file is the module VERSION.NAME; one that lies in no version folder (a Python-based backend's) is NAME.
 4. sys.argv is [""], as in a program that embeds Python.
 5. Workers that the model starts anew (spawned pools) are told sys.path. So where this package is not installed, a folder
    that leads to it stands at the end.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from collections.abc import Callable
from importlib import machinery
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_IMPORTABLE = os.path.join(_PACKAGE, "_importable")


class FreshLoader(machinery.SourceFileLoader):
    """Compiles a module from its source each time (rule 2)."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        linecache.checkcache(path)
        return self.source_to_code(self.get_data(path), path)


def load(path: str) -> Any:
    """Executes a model's file and returns its module. Raises what the file raises."""
    sys.argv[:] = [""]
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    name = os.path.splitext(os.path.basename(path))[0]
    version = os.path.basename(folder)
    if version.isdigit():
        _search([folder, os.path.dirname(folder)])
        name = f"{version}.{name}"
        _make_package(version, folder)
    else:
        _search([folder])
    spec = importlib.util.spec_from_file_location(name, path, loader=FreshLoader(name, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _make_package(name: str, folder: str) -> None:
    """The package that relative imports of the model's file start from: the version folder."""
    spec = machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder]
    sys.modules[name] = importlib.util.module_from_spec(spec)


def _search(folders: list[str]) -> None:
    """Puts the folders on sys.path. Rules 1 and 2."""
    new = [folder for folder in folders if folder not in sys.path]
    place = _behind_python()
    sys.path[place:place] = new
    if new:
        sys.path_hooks.insert(0, _finder(folders[-1]))
    if os.path.dirname(_PACKAGE) not in sys.path and _IMPORTABLE not in sys.path:
        sys.path.append(_IMPORTABLE)


def _behind_python() -> int:
    """The place in sys.path behind Python's own modules."""
    library = os.path.dirname(os.__file__)
    behind = sys.path.index(library) + 1 if library in sys.path else 0
    for place in range(behind, len(sys.path)):
        if os.path.basename(sys.path[place]) in ("site-packages", "dist-packages"):
            return place
    return len(sys.path)


def _finder(root: str) -> Callable[[str], machinery.FileFinder]:
    """A path hook for `root` and the folders below it, without an interpreter's that the model brings along."""
    inside = root + os.sep
    environment = sys.prefix + os.sep if sys.prefix.startswith(inside) else None

    def finder(path: str) -> machinery.FileFinder:
        if path != root and not path.startswith(inside):
            raise ImportError("it is not the model's folder")
        if environment is not None and path.startswith(environment):
            raise ImportError("it is the interpreter's folder")
        if not os.path.isdir(path):
            raise ImportError("it is no folder")
        return machinery.FileFinder(
            path,
            (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
            (FreshLoader, machinery.SOURCE_SUFFIXES),
            (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
        )

    return finder
