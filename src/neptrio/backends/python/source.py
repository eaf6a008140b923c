"""Loads a model's file into the server's process, so that each instance has its own module and models do not see each
other's. (In processes of their own: triton_python_backend_utils._process.modules.)

The problem: models are files called model.py with helper modules beside them. Two models may both have a helper.py, a
reload must use the new code, and sys.path must not change. The choice: a model's file is executed as a module with a
unique name. Imports in it and in its helpers use an `__import__` of the model's own, which looks beside the file first.

Rules:
 1. A module beside the model file, or beside its version folder, has precedence over an installed package of that name, for
    this model only.
 2. Code is compiled from source at each load; cached bytecode is neither read nor written.
 3. Modules of a model are in sys.modules under "<unique>.<name>", so that pickling, dataclasses
    and debuggers work; unload() removes them.
 4. `import helper`, `from helper import x`, `from . import helper` and packages beside the file
    work, also inside functions. importlib.import_module("helper") does not see them;
    importlib.import_module(".helper", __package__) does.
 5. Files are looked for once: what was not beside the file when it was first imported is not looked for again. A model may
    import in execute(), and libraries written in C import on its behalf, each time they are called.
"""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from neptrio.backends.python import examine
from triton_python_backend_utils._process.modules import FreshLoader

_numbers = itertools.count(1)


class _Loader(FreshLoader):
    """Makes the model's `__import__` the module's own."""

    def __init__(self, fullname: str, path: str, source: ModelSource) -> None:
        super().__init__(fullname, path)
        self._source = source

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = self._source.builtins
        super().exec_module(module)


class ModelSource:
    """One load of one model file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.folders = examine.folders(path)
        self.package = f"neptrio_model_{next(_numbers)}_{''.join(c if c.isalnum() else '_' for c in name)}"
        self._elsewhere: set[str] = set()  # top-level modules that are not beside the file
        self.builtins = dict(builtins.__dict__, __import__=self._import)

    def load(self) -> types.ModuleType:
        """Executes the file and returns its module. Raises what the file raises."""
        root = types.ModuleType(self.package)
        root.__path__ = [str(folder) for folder in self.folders]
        sys.modules[self.package] = root
        try:
            return self._load(f"{self.package}.{self.path.stem}", self.path, None)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Removes the model's modules from sys.modules. They refer to themselves: the collector frees them."""
        prefix = self.package + "."
        for name in list(sys.modules):
            if name == self.package or name.startswith(prefix):
                sys.modules.pop(name, None)

    def _load(self, fullname: str, path: Path, package_folder: Path | None) -> types.ModuleType:
        loader = _Loader(fullname, str(path), self)
        spec: ModuleSpec | None = importlib.util.spec_from_file_location(
            fullname,
            path,
            loader=loader,
            submodule_search_locations=None if package_folder is None else [str(package_folder)],
        )
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[fullname] = module
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(fullname, None)
            raise
        return module

    def _find(self, name: str) -> types.ModuleType | None:
        """Loads the module `name` (with dots for packages) beside the model file; None if there is none."""
        if name in self._elsewhere:
            return None
        fullname = f"{self.package}.{name}"
        module = sys.modules.get(fullname)
        if module is not None:
            return module
        parent, _, leaf = name.rpartition(".")
        for folder in self.folders:
            place = folder.joinpath(*name.split("."))
            if (place / "__init__.py").is_file():
                found = self._load(fullname, place / "__init__.py", place)
                break
            if place.with_suffix(".py").is_file():
                found = self._load(fullname, place.with_suffix(".py"), None)
                break
        else:
            if not parent:
                self._elsewhere.add(name)
            return None
        holder = sys.modules.get(f"{self.package}.{parent}" if parent else self.package)
        if holder is not None:
            setattr(holder, leaf, found)
        return found

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            return self._absolute(name, globals, locals, fromlist)
        package = (globals or {}).get("__package__") or ""
        if package != self.package and not package.startswith(self.package + "."):
            return builtins.__import__(name, globals, locals, fromlist, level)
        base = package.split(".")
        if level > len(base):
            raise ImportError("attempted relative import beyond the model's folder")
        inside = base[1 : len(base) - level + 1]
        target = ".".join([*inside, name] if name else inside)
        if not target:
            module: Any = sys.modules[self.package]
        else:
            module = self._walk(target)
            if module is None:
                raise ModuleNotFoundError(f"No module named '{target}' beside {self.path}", name=target)
        self._load_names(module, target, fromlist)
        return module

    def _absolute(self, name: str, globals: Any, locals: Any, fromlist: Any) -> Any:
        top = self._find(name.partition(".")[0])
        if top is None:
            return builtins.__import__(name, globals, locals, fromlist, 0)
        module = self._walk(name)
        if module is None:
            raise ModuleNotFoundError(f"No module named '{name}' beside {self.path}", name=name)
        if not fromlist:
            return top
        self._load_names(module, name, fromlist)
        return module

    def _walk(self, name: str) -> types.ModuleType | None:
        parts = name.split(".")
        module = None
        for i in range(len(parts)):
            module = self._find(".".join(parts[: i + 1]))
            if module is None:
                return None
        return module

    def _load_names(self, module: Any, name: str, fromlist: Any) -> None:
        """`from package import submodule` loads the submodule."""
        if not hasattr(module, "__path__"):
            return
        for item in fromlist or ():
            if item == "*":
                self._load_names(module, name, getattr(module, "__all__", ()))
            elif not hasattr(module, item):
                self._find(f"{name}.{item}" if name else item)
