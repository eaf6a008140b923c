"""What compiled code calls as Class.method(object, ...) is that method whatever the object's class: no class may replace it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Class.method(self, ...), Class.method(self.attribute, ...), Class.method(name, ...)
CALL = re.compile(r"\b([A-Z]\w+)\.([a-z]\w*)\((?:self|[a-z][\w.]*)\s*[,)]")
CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:", re.MULTILINE)
METHOD = re.compile(r"^    (?:cp?def|def)\s[^(\n]*?(\w+)\(", re.MULTILINE)


def compiled() -> Iterator[tuple[str, list[str], set[str]]]:
    """(class, its bases, its methods) of each class in the compiled modules."""
    for path in sorted((ROOT / "cext").rglob("*.pyx")):
        parts = CLASS.split(path.read_text())
        for name, base, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            yield name, [base] if base else [], set(METHOD.findall(body))


def in_python() -> Iterator[tuple[str, list[str], set[str]]]:
    """The same of the classes in Python."""
    for path in sorted((ROOT / "src" / "neptrio").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [b.id if isinstance(b, ast.Name) else getattr(b, "attr", "") for b in node.bases]
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                yield node.name, bases, {item.name for item in node.body if isinstance(item, functions)}


def called_in(text: str, ours: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """(class, method) of each such call, but for those by which a method calls the one that it extends."""
    parts = METHOD.split(text)
    for within, body in zip(["", *parts[1::2]], parts[::2], strict=True):
        for name, method in CALL.findall(body):
            if method in ours.get(name, ()) and method != within:
                yield name, method


def test_no_class_replaces_what_is_called_by_the_name_of_its_base() -> None:
    classes = [*compiled(), *in_python()]
    ours = {name: methods for name, _, methods in compiled()}
    calls = {call for path in (ROOT / "cext").rglob("*.pyx") for call in called_in(path.read_text(), ours)}
    assert ("InstanceCore", "submit") in calls
    for called, method in sorted(calls):
        below, found = {called}, 0
        while len(below) != found:
            found = len(below)
            below |= {name for name, bases, _ in classes if below.intersection(bases)}
        replacing = [name for name, _, methods in classes if name in below - {called} and method in methods]
        assert not replacing, f"{called}.{method} is called by the class's name, and replaced in {replacing}"
