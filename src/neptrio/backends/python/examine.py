"""Reads a model.py without running it: for the check of a repository, and to see which methods the model has."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triton_python_backend_utils._execute import ways_to_a_module

CLASS = "TritonPythonModel"


@dataclass(frozen=True)
class Outline:
    """The parts of a model's file that the server looks for."""

    tree: ast.Module | None
    error: str = ""  # why it cannot be compiled
    found: bool = False  # it has a TritonPythonModel, or may import one
    executes: bool = True  # it has execute(), or may inherit it
    completes: bool = False  # it has auto_complete_config(), or may inherit it
    line: int = 0  # where the class begins


def read(path: Path) -> Outline:
    """The outline of a model's file."""
    try:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
        compile(source, str(path), "exec", dont_inherit=True)
    except OSError as error:
        return Outline(None, f"{path}: cannot be read: {error.strerror}")
    except SyntaxError as error:
        return Outline(None, f"{path}:{error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Outline(None, f"{path}: {error}")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == CLASS:
            names = {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
            inherits = bool(node.bases)
            assigned = {t.id for n in ast.walk(node) if isinstance(n, ast.Name) for t in (n,)}
            return Outline(
                tree,
                "",
                True,
                "execute" in names | assigned or inherits,
                "auto_complete_config" in names | assigned or inherits,
                node.lineno,
            )
    indirect = any(
        isinstance(node, (ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)) and _names(node)
        for node in tree.body
    )
    return Outline(tree, "", indirect, True, indirect)


def _names(node: ast.AST) -> bool:
    return any(
        (isinstance(n, ast.alias) and (n.asname or n.name) in (CLASS, "*"))
        or (isinstance(n, ast.Name) and n.id == CLASS)
        or (isinstance(n, ast.ClassDef) and n.name == CLASS)
        for n in ast.walk(node)
    )


def preloads(path: Path) -> bool:
    """Whether the file has a function preload(args), at top level or in its TritonPythonModel."""
    tree = read(path).tree
    if tree is None:
        return False
    places = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == CLASS)]
    return any(isinstance(n, ast.FunctionDef) and n.name == "preload" for body in places for n in body)


def missing_imports(path: Path) -> list[str]:
    """The top-level packages that are not installed here and that the file imports when it is executed, or a module
    beside it that it imports."""
    found: list[str] = []
    files, seen = [path], {path}
    for file in files:
        tree = read(file).tree
        for name, _ in _imported(tree) if tree is not None else ():
            beside = [file for folder in folders(path) if (file := folder / f"{name}.py").is_file()]
            if beside:
                if beside[0] not in seen:
                    files.append(beside[0])
                    seen.add(beside[0])
            elif (
                name not in found
                and not any(_beside(name, folder) for folder in folders(path))
                and not _installed(name)
            ):
                found.append(name)
    return found


def problems(path: Path, imports: bool = True) -> Iterator[str]:
    """Why the file could not be loaded. With `imports`, modules that are not installed are reported, too."""
    outline = read(path)
    if outline.tree is None:
        yield outline.error
        return
    if not outline.found:
        yield f"{path}: has no class {CLASS}"
    elif not outline.executes:
        yield f"{path}:{outline.line}: class {CLASS} has no method execute"
    if imports:
        for name, line in _imported(outline.tree):
            if not any(_beside(name, folder) for folder in folders(path)) and not _installed(name):
                yield f"{path}:{line}: No module named '{name}' ({ways_to_a_module()})"


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The top-level packages that the file imports when it is executed, with their line numbers."""
    seen: set[str] = set()
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in seen:
                seen.add(top)
                yield top, node.lineno


def folders(path: Path) -> list[Path]:
    """Where modules of a model's file are looked for: beside it, and beside its version folder."""
    return [path.parent, path.parent.parent] if path.parent.name.isdigit() else [path.parent]


def _beside(name: str, folder: Path) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # only running it would tell
