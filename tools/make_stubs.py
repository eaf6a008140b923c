"""Writes the stub (.pyi) of every compiled module from its sources: `make stubs`.

The problem: mypy reads stubs, and one that is written by hand says in time something else than its module. The choice:
the sources say all of it, most of it for the compiler's sake, and what the compiler does not want to know stands in
type comments, which cost nothing at run time:

    cdef public dict open          # requests by number  # type: dict[int, InferRequest]
    LIMITS = make_limits()         # type: tuple[int, ...]

    def copy(self, str activity, tensors, int response=0):
        # type: (..., Iterable[Tensor] | None, ...) -> None

Rules:
 1. A declaration's type is that of its type comment. There `...` stands for what the source says without it.
 2. Without one: numbers, strings and classes as they are declared, Any within containers and for what is not declared.
    A parameter whose default is None may be None.
 3. A function without a type comment or annotation returns None where no `return` has a value, and Any elsewhere.
 4. A stub has what Python can reach: attributes that are public or readonly, properties, def and cpdef, enums,
    constants. Of special methods it has __init__, __len__, __call__ and the buffer protocol, of private classes,
    functions and constants nothing.
 5. Where a name comes from is found in this order: this module, what it imports, well-known modules, the one class or
    alias of that name in its package, at the top of the project, in a compiled module, in the project. A name with dots
    is imported from there.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEXT = ROOT / "cext"
SOURCES = ROOT / "src" / "neptrio"

SIGNS = r"(?:unsigned |signed )?"
WHOLE = re.compile(
    rf"{SIGNS}(?:u?int(?:8|16|32|64)_t|uintptr_t|s?size_t|Py_ssize_t|int|long|long long|short|char)"
)
CONTAINERS = {"list": "list[Any]", "dict": "dict[Any, Any]", "tuple": "tuple[Any, ...]", "set": "set[Any]"}
PLAIN = {
    "str": "str",
    "bytes": "bytes",
    "bytearray": "bytearray",
    "bint": "bool",
    "double": "float",
    "float": "float",
}
WELL_KNOWN = {
    **dict.fromkeys(
        ["Callable", "Collection", "Container", "Iterable", "Iterator", "Mapping", "Sequence"],
        "collections.abc",
    ),
    "Any": "typing",
    "Buffer": "typing_extensions",
    "IntEnum": "enum",
    "deque": "collections",
}
MODULES = {"np": "import numpy as np", "socket": "import socket", "trio": "import trio"}
SPECIAL = ("__init__", "__len__", "__call__")


@dataclass
class Line:
    """A logical line: without comments and line breaks, strings emptied where they could confuse."""

    indent: int
    code: str
    comment: str


TOKEN = re.compile(
    r'''(?P<string>[rbRBfF]{0,2}(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))'''
    r"""|(?P<comment>\#[^\n]*)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<joined>\\\n)|(?P<end>\n)|(?P<other>[^"'\#()\[\]{}\\\n]+|.)""",
    re.S,
)


def lines(text: str) -> Iterator[Line]:
    depth = 0
    code, comments = "", []
    for match in TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind == "comment":
            comments.append(token[1:].strip())
        elif kind == "end" and not depth:
            if code.strip() or comments:
                yield Line(len(code) - len(code.lstrip()), code.strip(), "  # ".join(comments))
            code, comments = "", []
        elif kind in ("end", "joined"):
            code = code.rstrip() + " "
        elif kind == "other" and code.endswith(" ") and depth:
            code += token.lstrip()
        else:
            depth += (kind == "open") - (kind == "close")
            code += token if kind != "string" or "\n" not in token else '""'


def depths(text: str) -> Iterator[tuple[int, str, int]]:
    """(place, character, how many brackets are open behind it) of what is not in strings."""
    depth = 0
    for match in re.finditer(r""""[^"]*"|'[^']*'|.""", text, re.S):
        if len(match[0]) == 1:
            depth += (match[0] in "([{") - (match[0] in ")]}")
            yield match.start(), match[0], depth


def split(text: str) -> list[str]:
    """Parts between commas that are outside of all brackets."""
    parts, begin = [], 0
    for i, character, depth in depths(text):
        if character == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [part for part in [*parts, text[begin:].strip()] if part]


def type_comment(comment: str) -> str | None:
    match = re.search(r"(?:^|# )type: (.+)$", comment)
    return match[1].strip() if match else None


def python_type(declared: str) -> str:
    """The type of what the compiler knows as `declared`."""
    declared = re.sub(r"\b(?:const|struct|inline|public|readonly)\b", "", declared).strip().strip("'\"")
    if "[" in declared and re.search(r"\[[:,1 ]*\]", declared):
        return "Buffer"  # a memory view
    if WHOLE.fullmatch(declared):
        return "int"
    if declared in ("", "object") or declared.endswith("*") or declared.startswith("_") or "." in declared:
        return "Any"
    return CONTAINERS.get(declared) or PLAIN.get(declared) or declared


@dataclass
class Parameter:
    name: str  # with its stars
    type: str
    default: str = ""

    def text(self) -> str:
        if self.name in ("*", "/"):
            return self.name
        said = f"{self.name}: {self.type}"
        return f"{said} = {self.default}" if self.default else said


def parameter(text: str) -> Parameter:
    head, _, default = (part.strip() for part in text.partition("="))
    if head in ("*", "/"):
        return Parameter(head, "")
    declared, annotation = head, ""
    if (at := re.search(r"(?<![\[:]):(?![:\]])", head)) is not None:
        declared, annotation = head[: at.start()].strip(), head[at.end() :].strip()
    may_be_none = not declared.endswith(" not None")
    declared = declared.removesuffix(" not None").removesuffix(" or None")
    match = re.fullmatch(r"(.*?)(\*{0,2}\w+)", declared)
    assert match, text
    kind = annotation or python_type(match[1].strip())
    if default:
        if default == "None" and may_be_none and kind != "Any" and "None" not in kind:
            kind += " | None"
        try:
            ast.literal_eval(default)
        except (ValueError, SyntaxError):
            default = "..."
        if kind == "bool" and default in ("0", "1"):
            default = str(bool(int(default)))
    return Parameter(match[2], kind, default)


@dataclass
class Function:
    name: str
    parameters: list[Parameter]
    returns: str
    decorators: list[str]
    given: str | None = None  # the type comment

    def text(self, in_class: bool) -> list[str]:
        own = self.parameters
        if in_class and "staticmethod" not in self.decorators:
            own = own[1:]
        first = [p.name for p in self.parameters[: len(self.parameters) - len(own)]]
        result = self.take_given(own)
        result = {"__init__": "None", "__len__": "int"}.get(self.name, result)
        texts = ", ".join([*first, *(p.text() for p in own)])
        return [*(f"@{d}" for d in self.decorators), f"def {self.name}({texts}) -> {result}: ..."]

    def take_given(self, own: list[Parameter]) -> str:
        """Gives the parameters the types of the type comment; returns the type of the result."""
        if self.given is None:
            return self.returns
        match = re.fullmatch(r"\((.*)\) -> (.+)", self.given)
        types = split(match[1]) if match else []
        own = [p for p in own if p.name not in ("*", "/")]
        assert match and len(types) == len(own), f"{self.name}: not a type for each parameter: {self.given}"
        for one, kind in zip(own, types, strict=True):
            one.type = one.type if kind == "..." else kind
        return self.returns if match[2] == "..." else match[2]


@dataclass
class Class:
    name: str
    bases: list[str]
    native: bool
    attributes: dict[str, tuple[str, bool]] = field(default_factory=dict)  # -> (type, whether it can be set)
    functions: list[Function] = field(default_factory=list)
    members: list[str] = field(default_factory=list)  # of an enum


@dataclass
class Module:
    name: str
    constants: dict[str, str] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    order: list[Class | Function] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)  # name -> module


def function(line: Line, body: list[Line], decorators: list[str]) -> Function:
    """A def or cpdef."""
    code = re.sub(r"^async ", "", line.code)
    head, _, rest = code.partition("(")
    words = head.split()
    end = next(i for i, _, depth in depths(rest) if depth < 0)
    inside, behind = rest[:end], rest[end + 1 :]
    declared = python_type(" ".join(w for w in words[1:-1] if w not in ("inline", "api")))
    if words[0] == "def" or not words[1:-1]:
        declared = ""
    if (match := re.search(r"-> (.+?)\s*:", behind)) is not None:
        returns = python_type(match[1])
    elif declared and declared != "Any":
        returns = declared
    else:
        returns = "Any" if gives_something(body) else "None"
    given = next((type_comment(one.comment) for one in body[:1] if not one.code), None)
    return Function(words[-1], [parameter(p) for p in split(inside)], returns, decorators, given)


def gives_something(body: list[Line]) -> bool:
    """Whether a function's body returns a value, or is a generator's."""
    inner = 1 << 30
    for line in body:
        if line.indent <= inner:
            inner = line.indent if re.match(r"(?:async )?(?:def|class) ", line.code) else 1 << 30
            if re.match(r"return .*\S", line.code) and line.code != "return None":
                return True
            if re.search(r"\byield\b", line.code) and not line.code.startswith("#"):
                return True
    return False


def body_of(found: list[Line], at: int) -> list[Line]:
    body = []
    for line in found[at + 1 :]:
        if line.code and line.indent <= found[at].indent:
            break
        body.append(line)
    return body


DECLARED = re.compile(r"(?:cdef )?(public|readonly) (.+)")


def attribute(line: Line, into: dict[str, tuple[str, bool]]) -> None:
    """A line `cdef public TYPE NAME, NAME`."""
    match = DECLARED.fullmatch(line.code)
    if match is None:
        return
    first, *more = split(match[2])
    declared, _, name = first.rpartition(" ")
    kind = type_comment(line.comment) or python_type(declared)
    for one in (name, *more):
        into[one.partition("=")[0].strip()] = (kind, match[1] == "public")


def initialised(made: Class, body: list[Line]) -> None:
    """The attributes of a class written in Python: what __init__ sets."""
    init = made.functions[-1]
    init.take_given(init.parameters[1:])
    known = {p.name: p.type for p in init.parameters}
    for line in body:
        if (match := re.match(r"self\.([A-Za-z]\w*)(?:: ([^=]+))? = (.+)", line.code)) is not None:
            kind = type_comment(line.comment) or match[2] or known.get(match[3]) or value_type(match[3])
            made.attributes.setdefault(match[1], (kind.strip(), True))


def value_type(text: str) -> str:
    """The type of a constant's value."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "int" if re.fullmatch(r"[\d_A-Z +*<-]+", text) else "Any"
    return CONTAINERS.get(type(value).__name__, type(value).__name__) if value is not None else "Any"


def read(name: str) -> Module:
    """What the sources of a module declare."""
    module = Module(name)
    base = CEXT.joinpath(*name.split("."))
    for suffix in (".pxd", ".pyx"):
        path = base.with_suffix(suffix)
        if path.exists():
            read_file(module, list(lines(path.read_text(encoding="utf-8"))), suffix)
    return module


def read_file(module: Module, found: list[Line], suffix: str) -> None:
    for at, line in enumerate(found):
        if line.indent or not line.code:
            continue
        code = line.code
        if (match := re.match(r"from ([\w.]+) c?import (.+)", code)) is not None:
            for name in split(match[2].strip("()")):
                module.imports.setdefault(name.rpartition(" ")[2], match[1])
        elif (match := re.match(r"(?:cdef |cpdef )?class (\w+)(?:\((.*)\))?:", code)) is not None:
            made = module.classes.setdefault(match[1], Class(match[1], [], code.startswith("cdef")))
            made.bases = made.bases or [b for b in split(match[2] or "") if b != "object"]
            read_class(made, body_of(found, at))
            if suffix == ".pyx":
                module.order.append(made)
        elif (match := re.match(r"cpdef enum (\w+):", code)) is not None:
            made = Class(match[1], ["IntEnum"], True)
            for one in body_of(found, at):
                made.members += split(one.code)
            module.classes[match[1]] = made
            module.order.append(made)
        elif suffix == ".pyx" and re.match(r"(?:async )?(?:def|cpdef) ", code):
            module.order.append(function(line, body_of(found, at), []))
        elif (
            suffix == ".pyx" and (match := re.match(r"([A-Za-z]\w*)(?:: ([^=]+))? = (.+)", code)) is not None
        ):
            kind = type_comment(line.comment) or (match[2] or "").strip() or value_type(match[3])
            module.constants.setdefault(match[1], kind)


def read_class(made: Class, body: list[Line]) -> None:
    decorators: list[str] = []
    for at, line in enumerate(body):
        if not line.code or line.indent != 4:
            continue
        if line.code.startswith("@"):
            decorators.append(line.code[1:])
            continue
        for one in body_of(body, at) if line.code == "cdef:" else [line]:
            attribute(one, made.attributes)
        if re.match(r"(?:async )?(?:def|cpdef) .*:$", line.code):
            own = body_of(body, at)
            made.functions.append(function(line, own, [d for d in decorators if not d.startswith("cython")]))
            if made.functions[-1].name == "__init__" and not made.native:
                initialised(made, own)
        decorators = []


# ------------------------------------------------------------ text


@cache
def declared_somewhere() -> dict[str, set[str]]:
    """Class or alias -> the modules of the project that declare it."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        module = "neptrio." + ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names: Iterable[str] = ()
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            for name in names:
                found.setdefault(name, set()).add(module.removesuffix(".__init__"))
    for path in CEXT.rglob("*.pyx"):
        module = "neptrio." + ".".join(path.relative_to(CEXT).with_suffix("").parts)
        for name in re.findall(r"^(?:cdef )?class (\w+)", path.read_text(encoding="utf-8"), re.M):
            found.setdefault(name, set()).add(module)
    return found


def import_of(name: str, module: Module) -> str:
    """The line that makes a name known. Raises LookupError."""
    if name in module.imports and module.imports[name].startswith("neptrio"):
        return f"from {module.imports[name]} import {name}"
    if name in WELL_KNOWN:
        return f"from {WELL_KNOWN[name]} import {name}"
    if name in MODULES:
        return MODULES[name]
    if name in module.imports:
        return f"from {module.imports[name]} import {name}"
    places = declared_somewhere().get(name, set())
    package = f"neptrio.{module.name}".rpartition(".")[0]
    near = {place for place in places if place.rpartition(".")[0] == package}
    top = {place for place in places if place.count(".") == 1}
    native = {place for place in places if CEXT.joinpath(*place.split(".")[1:]).with_suffix(".pyx").exists()}
    places = near or top or native or places
    if len(places) != 1:
        raise LookupError(f"{module.name}: where is {name} from? {sorted(places) or 'nowhere'}")
    return f"from {next(iter(places))} import {name}"


def class_text(made: Class) -> Iterator[str]:
    bases = f"({', '.join(made.bases)})" if made.bases else ""
    yield f"class {made.name}{bases}:"
    empty = True
    for i, member in enumerate(made.members):
        name, _, value = (part.strip() for part in member.partition("="))
        assert not value or value == str(i), f"{made.name}.{name}"
        yield f"    {name} = {i}"
        empty = False
    for name, (kind, settable) in made.attributes.items():
        empty = False
        if settable:
            yield f"    {name}: {kind}"
        else:
            yield from (f"    {line}" for line in ("@property", f"def {name}(self) -> {kind}: ..."))
    for one in made.functions:
        if one.name == "__getbuffer__":
            yield "    def __buffer__(self, flags: int, /) -> memoryview: ..."
            empty = False
        if one.name.startswith("__") and one.name not in SPECIAL:
            continue
        yield from (f"    {line}" for line in one.text(True))
        empty = False
    if empty:
        yield "    ..."


def stub(name: str) -> str:
    """The stub of a module, not formatted."""
    module = read(name)
    body = [f"{constant}: {kind}" for constant, kind in module.constants.items() if constant != "log"]
    for one in module.order:
        if not one.name.startswith("_"):
            body += one.text(False) if isinstance(one, Function) else class_text(one)
    text = "\n".join(body) + "\n"
    imports: set[str] = set()
    for dotted in sorted(set(re.findall(r"\bneptrio(?:\.\w+)+\.\w+", text)), key=len, reverse=True):
        where, _, what = dotted.rpartition(".")
        module.imports[what] = where
        text = text.replace(dotted, what)
    for used in names_in(text):
        if used not in module.classes and used not in dir(builtins):
            imports.add(import_of(used, module))
    head = f"# The types of cext/{name.replace('.', '/')}.pyx, which says what everything does; written by tools/make_stubs.py.\n"
    return head + "\n".join(sorted(imports)) + "\n\n" + text


def names_in(text: str) -> set[str]:
    """The names that a stub uses, but for those of its decorators."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def modules() -> list[str]:
    return sorted(".".join(path.relative_to(CEXT).with_suffix("").parts) for path in CEXT.rglob("*.pyx"))


def make(folder: Path) -> None:
    """Writes all stubs below `folder`, formatted."""
    paths = []
    for name in modules():
        path = folder.joinpath(*name.split(".")).with_suffix(".pyi")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stub(name), encoding="utf-8")
        paths.append(str(path))
    ruff = [sys.executable, "-m", "ruff"]
    config = ["-q", "--config", str(ROOT / "pyproject.toml")]
    subprocess.run([*ruff, "check", *config, "--select", "I,F401", "--fix", *paths], check=True)
    subprocess.run([*ruff, "format", *config, *paths], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
        for path in sorted(Path(made).rglob("*.pyi")):
            there = SOURCES / path.relative_to(made)
            if not there.exists() or there.read_text(encoding="utf-8") != path.read_text(encoding="utf-8"):
                there.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
                print(there.relative_to(ROOT))
        for there in SOURCES.rglob("*.pyi"):
            if not (Path(made) / there.relative_to(SOURCES)).exists():
                there.unlink()
                print(f"{there.relative_to(ROOT)}: removed")


if __name__ == "__main__":
    main()
