"""Reads from the text of a CUDA source which kernels it declares, with their parameters.

That does not need a C++ parser: comments and strings are replaced by blanks, which keeps positions, and
`__global__ ... void NAME ( ... )` is searched for. Types are reduced to an element kind that can be compared with a
tensor's datatype. Plain typedefs, `using X = Y;` and `#define X Y` are followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from neptrio.errors import InvalidArgument


@dataclass(frozen=True)
class CType:
    """An element type: its canonical name, size in bytes and kind (i, u, f, b, h, B, q, v, x)."""

    name: str
    size: int
    kind: str  # i signed, u unsigned, f float, b bool, h half, B bfloat16, q float of eight bits, v void


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the source declares it."""

    text: str
    type: CType | None  # None: a type that is not checked
    pointer: bool
    const: bool

    @property
    def size(self) -> int:
        """Bytes that it takes in the argument list, 0 when unknown."""
        return 8 if self.pointer else self.type.size if self.type else 0


@dataclass(frozen=True)
class Signature:
    """One `__global__` function and its parameters."""

    name: str
    line: int
    parameters: tuple[Parameter, ...]
    template: bool


_BASE = {
    "char": ("char", 1, "i"),
    "signed char": ("signed char", 1, "i"),
    "unsigned char": ("unsigned char", 1, "u"),
    "short": ("short", 2, "i"),
    "unsigned short": ("unsigned short", 2, "u"),
    "int": ("int", 4, "i"),
    "unsigned": ("unsigned int", 4, "u"),
    "unsigned int": ("unsigned int", 4, "u"),
    "long": ("long", 8, "i"),
    "unsigned long": ("unsigned long", 8, "u"),
    "long long": ("long long", 8, "i"),
    "unsigned long long": ("unsigned long long", 8, "u"),
    "float": ("float", 4, "f"),
    "double": ("double", 8, "f"),
    "bool": ("bool", 1, "b"),
    "half": ("__half", 2, "h"),
    "nv_bfloat16": ("__nv_bfloat16", 2, "B"),
    "__nv_fp8_e4m3": ("__nv_fp8_e4m3", 1, "q"),
    "__nv_fp8_e5m2": ("__nv_fp8_e5m2", 1, "q"),
    "void": ("void", 0, "v"),
}
_ALIASES = {
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "uchar": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "ushort": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "uint": "unsigned int",
    "int64_t": "long long",
    "uint64_t": "unsigned long long",
    "size_t": "unsigned long",
    "ptrdiff_t": "long",
    "ssize_t": "long",
    "__half": "half",
    "__nv_bfloat16": "nv_bfloat16",
}
for _base in ("char", "short", "int", "long", "longlong", "float", "double"):
    for _n in "1234":
        _plain = {"longlong": "long long", "char": "signed char"}.get(_base, _base)
        _ALIASES[f"{_base}{_n}"] = _plain
        if _base not in ("float", "double"):
            _ALIASES[f"u{_base}{_n}"] = "unsigned " + {"longlong": "long long"}.get(_base, _base)
_ALIASES |= {
    "half2": "half",
    "__half2": "half",
    "nv_bfloat162": "nv_bfloat16",
    "__nv_bfloat162": "nv_bfloat16",
    "__nv_fp8_storage_t": "unsigned char",
    **{f"__nv_fp8x{n}_{kind}": f"__nv_fp8_{kind}" for n in (2, 4) for kind in ("e4m3", "e5m2")},
}

# datatype number -> ((kind, size), name) that a pointer parameter for such a tensor must have
OF_DATATYPE = {
    1: (("b", 1), "bool"),
    2: (("u", 1), "unsigned char"),
    3: (("u", 2), "unsigned short"),
    4: (("u", 4), "unsigned int"),
    5: (("u", 8), "unsigned long long"),
    6: (("i", 1), "signed char"),
    7: (("i", 2), "short"),
    8: (("i", 4), "int"),
    9: (("i", 8), "long long"),
    10: (("h", 2), "__half"),
    11: (("f", 4), "float"),
    12: (("f", 8), "double"),
    14: (("B", 2), "__nv_bfloat16"),
}

_NOISE = re.compile(
    r"\b(?:const|volatile|__restrict__|__restrict|restrict|struct|register|__grid_constant__)\b"
)
_GLOBAL = re.compile(r"\b__global__\b")
_WORD = re.compile(r"[A-Za-z_]\w*")


def blank_comments(source: str, strings: bool = True) -> str:
    """The source with comments (and contents of strings) replaced by blanks; positions stay the same."""

    def blank(found: re.Match[str]) -> str:
        text = found.group(0)
        if text[0] in "\"'":
            return text if not strings else text[0] + " " * (len(text) - 2) + text[-1]
        return re.sub(r"[^\n]", " ", text)

    pattern = r'//(?:[^\n\\]|\\.|\\\n)*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
    return re.sub(pattern, blank, source, flags=re.DOTALL)


def line_of(source: str, position: int) -> int:
    """The line (from 1) of a position in the source."""
    return source.count("\n", 0, position) + 1


def closing(text: str, at: int, pair: str = "()") -> int:
    """The position of the bracket that closes the one at `at`, or -1."""
    depth = 0
    for i in range(at, len(text)):
        if text[i] == pair[0]:
            depth += 1
        elif text[i] == pair[1]:
            depth -= 1
            if depth == 0:
                return i
    return -1


def _aliases(text: str) -> dict[str, str]:
    found = dict(_ALIASES)
    for pattern in (
        r"\btypedef\s+([\w\s]+?)\s+(\w+)\s*;",
        r"()\busing\s+(\w+)\s*=\s*([\w\s:]+?)\s*;",
        r"()^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([A-Za-z_][\w ]*?)[ \t]*$",
    ):
        for match in re.finditer(pattern, text, re.MULTILINE):
            groups = match.groups()
            name, what = (groups[1], groups[2]) if len(groups) == 3 else (groups[1], groups[0])
            found.setdefault(name, " ".join(what.split()))
    return found


def _type(words: str, aliases: dict[str, str]) -> CType | None:
    words = " ".join(_NOISE.sub(" ", words).replace("std::", "").split())
    for _ in range(8):
        if words in _BASE:
            return CType(*_BASE[words])
        if words in aliases:
            words = " ".join(_NOISE.sub(" ", aliases[words]).replace("std::", "").split())
            continue
        parts = sorted(words.split(), key=lambda w: (w not in ("signed", "unsigned"), w == "int"))
        if "signed" in parts and parts != ["signed", "char"]:
            parts.remove("signed")
        if len(parts) > 1 and "int" in parts and ("long" in parts or "short" in parts):
            parts.remove("int")
        reordered = " ".join(parts) or "int"
        if reordered == words:
            return None
        words = reordered
    return None


def _parameter(text: str, aliases: dict[str, str]) -> Parameter:
    text = " ".join(text.split())
    body = re.sub(r"\s*=.*$", "", text)
    pointer = "*" in body or "[" in body
    if body.count("*") + body.count("[") > 1 or "&" in body:
        return Parameter(text, None, pointer, False)
    base = body.split("*")[0] if "*" in body else re.sub(r"\w+\s*\[.*$", "", body)
    kind = _type(base, aliases)
    if kind is None and not pointer:
        base = re.sub(r"\s*\b\w+$", "", base)
        kind = _type(base, aliases)
    const = re.search(r"\bconst\b", body.split("*")[0]) is not None
    return Parameter(text, kind, pointer, const)


def kernels(source: str, where: str) -> dict[str, Signature]:
    """The `__global__` functions of a source by name. Raises InvalidArgument with the line."""
    text = blank_comments(source)
    aliases = _aliases(text)
    found: dict[str, Signature] = {}
    for match in _GLOBAL.finditer(text):
        start = text.find("(", match.end())
        while start >= 0:
            before = text[match.end() : start]
            name = _WORD.findall(before)
            if name and name[-1] in (
                "__launch_bounds__",
                "__attribute__",
                "__maxnreg__",
                "__cluster_dims__",
                "__block_size__",
            ):
                start = text.find("(", closing(text, start) + 1)
                continue
            break
        stop = closing(text, start) if start >= 0 else -1
        line = line_of(text, match.start())
        if stop < 0:
            raise InvalidArgument(f"{where}:{line}: the parameter list after __global__ does not end")
        words = _WORD.findall(text[match.end() : start])
        if not words or "void" not in words[:-1]:
            raise InvalidArgument(
                f"{where}:{line}: expected '__global__ void name(...)', got '{text[match.start() : start].strip()}'"
            )
        inner = text[start + 1 : stop].strip()
        parameters = () if inner in ("", "void") else tuple(_parameter(p, aliases) for p in _split(inner))
        head = text[
            max(text.rfind(";", 0, match.start()), text.rfind("}", 0, match.start())) + 1 : match.start()
        ]
        found[words[-1]] = Signature(words[-1], line, parameters, "template" in head)
    return found


def _split(text: str) -> list[str]:
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        if c in "(<[":
            depth += 1
        elif c in ")>]":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [*parts, text[last:]]
