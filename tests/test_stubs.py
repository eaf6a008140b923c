"""Every compiled module has a stub (.pyi) beside its package's Python modules, and the two say the same.

Stubs are those that tools/make_stubs.py writes from the sources of today (`make stubs`). And so that what it reads there
is what the compiler reads, what a compiled module tells of itself is compared: its names, the parameters and types that Cython writes
into docstrings (embedsignature), the attributes of its classes and their types. A stub may say more exactly
what a module can only tell roughly: `list[Tensor]` for a list, `str | None` for what may be None (every
object type of Cython may), any type for an object.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tools import make_stubs

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "neptrio"
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "cext").with_suffix("").parts) for path in (ROOT / "cext").rglob("*.pyx")
)
OPTIONAL = ("nghttp2_", "cuda_")  # setup.py leaves these out where their headers are missing
# what Python reaches by an operator or a protocol, and what every class has
SPECIAL = {"__init__", "__call__", "__len__"}
WHOLE = {"int", "Py_ssize_t", "ssize_t", "size_t", "uintptr_t", "unsigned int", "long", "char"}
WHOLE |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
# Cython's name of a type -> how its stub may begin
MATCHING = {
    "list": {"list"},
    "dict": {"dict", "Mapping"},
    "set": {"set"},
    "tuple": {"tuple"},
    "double": {"float"},
    "bint": {"bool"},
} | {name: {"int"} for name in WHOLE}


def compiled(module: str) -> types.ModuleType:
    """The module; skips where it was not built."""
    if module.rpartition(".")[2].startswith(OPTIONAL):
        return pytest.importorskip(f"neptrio.{module}", exc_type=ImportError)
    return importlib.import_module(f"neptrio.{module}")


def stub(module: str) -> ast.Module:
    return ast.parse((SOURCES / Path(*module.split("."))).with_suffix(".pyi").read_text())


def own(found: types.ModuleType) -> dict[str, Any]:
    """The classes and functions that a module defines."""
    kinds = (type, types.BuiltinFunctionType, types.FunctionType)
    return {
        name: value
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (isinstance(value, kinds) or type(value).__name__ == "cython_function_or_method")
        and value.__module__ == found.__name__
    }


def constants(module: str) -> set[str]:
    """The constants of a module's source. Loggers are nobody else's."""
    text = ((ROOT / "cext").joinpath(*module.split("."))).with_suffix(".pyx").read_text()
    return set(re.findall(r"^([A-Za-z]\w*)(?:: [^=\n]+)? = ", text, re.M)) - {"log"}


def members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Name and declaration of each member; a property's setter is not a member of its own."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            if not any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in item.decorator_list):
                yield item.name, item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                assert isinstance(target, ast.Name)
                yield target.id, item


def is_property(item: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)


def agrees(said: str, annotation: ast.expr | None) -> bool:
    """Whether a stub's annotation fits what Cython says of a type."""
    said = said.strip("'").rpartition(".")[2]
    if annotation is None or said in ("", "object"):
        return True
    wanted = MATCHING.get(said, {said})
    return all(ast.unparse(part).partition("[")[0].rpartition(".")[2] in wanted for part in parts(annotation))


def parts(annotation: ast.expr) -> list[ast.expr]:
    """The types of a union, but None."""
    if isinstance(annotation, ast.BinOp):
        return parts(annotation.left) + parts(annotation.right)
    return [] if isinstance(annotation, ast.Constant) and annotation.value is None else [annotation]


def signature(doc: str) -> tuple[list[tuple[str, str, bool]], str] | None:
    """[(name, type, has a default)] and the return type, from the first line of a docstring."""
    match = re.match(r"[\w.]+\((.*)\)(?: -> (.+))?$", doc.partition("\n")[0])
    if match is None:
        return None
    found, depth, part = [], 0, ""
    for character in match[1] + ",":
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            name, equals, _ = part.partition("=")
            words = name.replace(" not None", "").replace("const ", "").split()
            if words and words[-1] not in ("self", "cls", "*", "/"):
                said = "" if any("[" in word for word in words) else " ".join(words[:-1])
                found.append((words[-1].strip("*"), said, bool(equals)))
            part = ""
        else:
            part += character
    return found, match[2] or ""


def parameters(node: ast.FunctionDef) -> list[tuple[str, ast.expr | None, bool]]:
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    firsts = len(plain) - len(arguments.defaults)
    found = [(a.arg, a.annotation, i >= firsts) for i, a in enumerate(plain)]
    if arguments.vararg is not None:
        found.append((arguments.vararg.arg, None, False))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(a.arg, a.annotation, default is not None) for a, default in pairs]
    return [row for row in found if row[0] not in ("self", "cls")]


def differences(node: ast.FunctionDef, doc: str) -> list[str]:
    """Where a stub's function is not the one that a docstring describes."""
    described = signature(doc)
    if described is None:
        return [f"{node.name}: no signature in its docstring"]
    wanted, returned = described
    given = parameters(node)
    if [(name, default) for name, _, default in wanted] != [(name, default) for name, _, default in given]:
        return [
            f"{node.name}({ast.unparse(node.args)}) in the stub, {doc.partition(chr(10))[0]} in the module"
        ]
    found = [
        f"{node.name}: {name} is {ast.unparse(annotation)} in the stub, {said} in the module"
        for (name, said, _), (_, annotation, _) in zip(wanted, given, strict=True)
        if annotation is not None and not agrees(said, annotation)
    ]
    if node.name != "__init__" and not agrees(returned, node.returns):
        assert node.returns is not None
        found.append(
            f"{node.name}: returns {ast.unparse(node.returns)} in the stub, {returned} in the module"
        )
    return found


def class_differences(node: ast.ClassDef, made: type) -> list[str]:
    """Where a stub's class is not the compiled one."""
    bases = {base.__name__ for base in made.__bases__} - {"object"}
    stubbed = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    if issubclass(made, Enum):
        stated = {n: ast.literal_eval(i.value) for n, i in members(node) if isinstance(i, ast.Assign)}
        return (
            []
            if stated == {m.name: m.value for m in made} and stubbed == {"IntEnum"}
            else [f"{node.name}: other members"]
        )
    found = [] if bases == stubbed else [f"{node.name}: bases {bases} in the module, {stubbed} in the stub"]
    declared = dict(members(node))
    has = {
        name: value
        for name, value in vars(made).items()
        if (not name.startswith("_") and name not in ("__dict__", "__weakref__")) or name in SPECIAL
    }
    for name in declared.keys() - has.keys():
        if name not in vars(made) and name != "__buffer__" and not instance_attribute(made):
            found.append(f"{node.name}.{name} is only in the stub")
    found += [
        f"{node.name}.{name} is not in the stub"
        for name in has.keys() - declared.keys()
        if wanted(made, name)
    ]
    for name in declared.keys() & vars(made).keys():
        item, value = declared[name], vars(made)[name]
        doc = (
            made.__doc__ if name == "__init__" else inspect.unwrap(getattr(value, "__func__", value)).__doc__
        )
        doc = doc or ""
        if isinstance(item, ast.FunctionDef) and is_property(item):
            if not isinstance(value, (types.GetSetDescriptorType, property)):
                found.append(f"{node.name}.{name} is a property in the stub only")
            elif (match := re.match(r"[\w.]+: (\S+)", doc)) and "." not in doc.partition(":")[0]:
                found.append(f"{node.name}.{name} can be set ({match[1]}), and in the stub it cannot")
        elif isinstance(item, ast.FunctionDef):
            if isinstance(value, (types.GetSetDescriptorType, property)):
                found.append(f"{node.name}.{name} is a method in the stub only")
            elif re.match(r"[\w.]+\(", doc):
                found += [f"{node.name}.{line}" for line in differences(item, doc)]
        elif isinstance(item, ast.AnnAssign):
            match = re.match(r"\w+: (\S+)$", doc.partition("\n")[0])
            if isinstance(value, types.MemberDescriptorType):  # __slots__, whose types nobody knows
                continue
            if match is None:
                found.append(f"{node.name}.{name} can be set in the stub, and not in the module")
            elif not agrees(match[1], item.annotation):
                said = ast.unparse(item.annotation)
                found.append(f"{node.name}.{name} is {said} in the stub, {match[1]} in the module")
    return found


def instance_attribute(made: type) -> bool:
    """A class written in Python, whose attributes are made by its __init__."""
    return made.__dictoffset__ != 0


def wanted(made: type, name: str) -> bool:
    """Whether a stub has to name a class's member: what object has, it need not."""
    return not (name == "__init__" and "(" not in (made.__doc__ or "").partition("\n")[0])


@pytest.mark.parametrize("module", MODULES)
def test_the_stub_says_what_the_module_is(module: str) -> None:
    found = compiled(module)
    top = {node.name: node for node in stub(module).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    values = {
        node.target.id
        for node in stub(module).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    defined = own(found)
    assert top.keys() == defined.keys()
    assert values == constants(module)
    wrong = []
    for name, node in top.items():
        if isinstance(node, ast.ClassDef):
            wrong += class_differences(node, defined[name])
        else:
            wrong += differences(node, defined[name].__doc__ or "")
    assert wrong == []


def test_stubs_are_what_the_sources_say(tmp_path: Path) -> None:
    make_stubs.make(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.pyi")}
    kept = {path.relative_to(SOURCES): path.read_text() for path in SOURCES.rglob("*.pyi")}
    assert [str(path) for path in made if made[path] != kept.get(path)] == [], "make stubs"
    assert made.keys() == kept.keys()


def test_every_stub_is_a_compiled_modules() -> None:
    stubs = {".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in SOURCES.rglob("*.pyi")}
    assert stubs == set(MODULES)


STALE = """
class Kind(IntEnum):
    A = 0
class Thing(Base):
    name: str
    size: int
    def act(self, shape: tuple[int, ...], count: int = 1) -> bool: ...
"""


def test_a_stub_that_went_stale_is_noticed() -> None:
    """The comparison itself: each way in which a stub can be wrong is told."""
    node = next(n for n in ast.parse(STALE).body if isinstance(n, ast.ClassDef) and n.name == "Thing")
    act = next(item for name, item in members(node) if name == "act")
    assert isinstance(act, ast.FunctionDef)
    assert differences(act, "Thing.act(self, tuple shape, int64_t count=1) -> bool") == []
    assert differences(act, "Thing.act(self, tuple shape, int64_t amount=1) -> bool")
    assert differences(act, "Thing.act(self, tuple shape, int64_t count) -> bool")
    assert differences(act, "Thing.act(self, list shape, int64_t count=1) -> bool")
    assert differences(act, "Thing.act(self, tuple shape, double count=1) -> bool")
    assert differences(act, "Thing.act(self, tuple shape, int64_t count=1) -> int")
    assert differences(act, "Thing.act(self, tuple shape, int64_t count=1, more=None) -> bool")


SOURCE = '''"""Opens."""
import logging
cimport cython
from neptrio.request.infer_request cimport InferRequest, Tensor
log = logging.getLogger("neptrio.x")
LIMIT = 1 << 4
NAMES = make()  # type: dict[str, bytes]
_private = 1

cdef enum:
    HIDDEN = 1

cdef class Base:
    cdef:
        readonly int a, b
        int hidden
    cdef public list given  # of a batch  # type: list[Tensor]
    cdef readonly object anything

    def __cinit__(self, int64_t a):
        pass

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        pass

@cython.final
cdef class Child(Base):
    def __init__(self, str name, Tensor tensor=None, *, size_t room=HIDDEN, bint last=0):
        pass

    def __len__(self):
        return 3

    cdef int inner(self) except -1:
        return 1

    cpdef object act(self, InferRequest request not None,
                     const char[::1] data, on_end=None):
        # type: (..., ..., Callable[[], object] | None) -> Iterable[Base]
        """def looks(like): code"""
        return [self]

    @property
    def state(self) -> str:
        return "x"

    @state.setter
    def state(self, str text):
        def inside():
            return 1
        self.text = text

    @staticmethod
    def of(double value, **more) -> dict:
        # type: (..., int) -> dict[str, float]
        return {}

class Layout:
    def __init__(self, size_t area):
        self.area = area
        self.size = measure(area)  # type: int

cpdef bint known(bytes data, text="a,b=(c"):
    return True

cpdef enum Kind:
    A = 0
    B
'''

STUB = """# The types of cext/observe/made_up.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from typing_extensions import Buffer

from neptrio.request.infer_request import InferRequest, Tensor

LIMIT: int
NAMES: dict[str, bytes]

class Base:
    @property
    def a(self) -> int: ...
    @property
    def b(self) -> int: ...
    given: list[Tensor]
    @property
    def anything(self) -> Any: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Child(Base):
    def __init__(
        self, name: str, tensor: Tensor | None = None, *, room: int = ..., last: bool = False
    ) -> None: ...
    def __len__(self) -> int: ...
    def act(
        self, request: InferRequest, data: Buffer, on_end: Callable[[], object] | None = None
    ) -> Iterable[Base]: ...
    @property
    def state(self) -> str: ...
    @state.setter
    def state(self, text: str) -> None: ...
    @staticmethod
    def of(value: float, **more: int) -> dict[str, float]: ...

class Layout:
    area: int
    size: int
    def __init__(self, area: int) -> None: ...

def known(data: bytes, text: Any = "a,b=(c") -> bool: ...

class Kind(IntEnum):
    A = 0
    B = 1
"""


def test_what_the_generator_makes_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "cext" / "observe" / "made_up.pyx"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    monkeypatch.setattr(make_stubs, "CEXT", tmp_path / "cext")
    make_stubs.make(tmp_path / "made")
    assert (tmp_path / "made" / "observe" / "made_up.pyi").read_text() == STUB
