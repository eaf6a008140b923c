"""A model's CUDA source: its text, its local headers, and what can be found out without compiling it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from neptrio.backends.kernel.signature import Signature, blank_comments, closing, kernels, line_of
from neptrio.errors import InvalidArgument

SOURCES = ("model.cu", "model.ptx", "model.cubin", "model.fatbin")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")

# operations that make a thread wait for others (or stop): on the host such a thread needs a stack of its own
WAITING = re.compile(
    r"__syncthreads(?:_count|_and|_or)?|__syncwarp|__shfl(?:_up|_down|_xor)?_sync|__ballot_sync|__any_sync"
    r"|__all_sync|__activemask|__reduce_(?:add|min|max|and|or|xor)_sync|__trap|assert"
)
# what the host build does not support, and its name in the error
REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\basm\b"), "inline PTX"),
    (re.compile(r"\bcooperative_groups\b"), "cooperative groups"),
    (re.compile(r"<<<"), "launching kernels from a kernel"),
    (
        re.compile(r"\b(?:tex[123]D\w*|surf[123]D\w*|texture|cudaTextureObject_t|cudaSurfaceObject_t)\b"),
        "textures",
    ),
    (re.compile(r"\b(?:nvcuda|wmma)\b"), "tensor core fragments"),
    (re.compile(r"\b__cluster_dims__\b"), "thread block clusters"),
    (re.compile(r"\b__match_(?:any|all)_sync\b"), "warp match operations"),
    (re.compile(r"\b__shfl(?:_up|_down|_xor)?\s*\("), "shuffles without _sync, which CUDA itself dropped,"),
    (re.compile(r"\b(?:cub|thrust)::"), "CUB and Thrust"),
    (re.compile(r"\bcuda::(?!std)"), "libcu++"),
    (re.compile(r"\b(?:curand|curandState\w*|curand_\w+)\b"), "cuRAND"),
)


@dataclass(frozen=True)
class File:
    """One file's text, and the name that errors use for it."""

    name: str
    text: str

    @cached_property
    def code(self) -> str:
        """The text without comments and contents of strings; positions stay the same."""
        return blank_comments(self.text)


_ANY_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|include_next|import)\b[ \t]*(.*)$", re.MULTILINE)


def closure(path: Path, folders: list[Path]) -> list[bytes] | None:
    """The contents of a source and of everything that it may include, wherever that lies: beside the including file,
    or in one of the folders. None when that can't be known (a macro names a file).

    Headers that are found nowhere are the compiler's own, or in a branch that is not taken.
    """
    found: dict[Path, bytes] = {}
    waiting = [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = file.read_bytes()
        text = blank_comments(found[file].decode(errors="replace"), strings=False)
        for match in _ANY_INCLUDE.finditer(text):
            named = re.match(r'["<]([^">\n]+)[">]', match.group(1))
            if named is None:
                return None
            for base in (file.parent, *folders):
                if (base / named.group(1)).is_file():
                    waiting.append((base / named.group(1)).resolve())
    return [found[file] for file in sorted(found)]


@dataclass(frozen=True)
class Source:
    """A .cu file and those headers in its folder that it includes."""

    path: Path
    files: tuple[File, ...]  # the main file first

    @cached_property
    def signatures(self) -> dict[str, Signature]:
        """Kernels by name, headers included. Raises InvalidArgument with file and line."""
        found: dict[str, Signature] = {}
        for file in reversed(self.files):
            found |= kernels(file.text, file.name)
        return found

    @cached_property
    def waiting(self) -> dict[str, str]:
        """Function name -> the barrier or warp operation that it reaches through calls or macros."""
        calls: dict[str, set[str]] = {}
        for file in self.files:
            for name, body in _bodies(file.code):
                calls.setdefault(name, set()).update(_WORD.findall(body))
        found: dict[str, str] = {}
        pending = True
        while pending:
            pending = False
            for name, used in calls.items():
                if name in found:
                    continue
                for word in used:
                    reached = word if WAITING.fullmatch(word) else found.get(word)
                    if reached:
                        found[name] = reached
                        pending = True
                        break
        return found

    def recursive(self, kernel: str) -> str:
        """A recursive function that `kernel` reaches, "" when there is none."""
        calls: dict[str, set[str]] = {}
        for file in self.files:
            for name, body in _bodies(file.code):
                calls.setdefault(name, set()).update(
                    w for w in re.findall(r"([A-Za-z_]\w*)\s*(?:<[^<>;(){}]*>\s*)?\(", body)
                )
        seen: set[str] = set()
        stack: list[tuple[str, tuple[str, ...]]] = [(kernel, ())]
        while stack:
            name, path = stack.pop()
            if name in path:
                return name
            if name in seen:
                continue
            seen.add(name)
            stack += [(callee, (*path, name)) for callee in calls.get(name, ()) if callee in calls]
        return ""

    def refuse(self) -> None:
        """Raises InvalidArgument with file, line and reason for anything that the host build does not support."""
        for file in self.files:
            for pattern, what in REFUSED:
                match = pattern.search(file.code)
                if match:
                    raise InvalidArgument(
                        f"{file.name}:{line_of(file.code, match.start())}: {what} ('{match.group(0).strip()}') can't run "
                        "on the host; serve this model with an instance_group of kind KIND_GPU"
                    )


def find(version_dir: Path, filename: str = "") -> Path:
    """The model's source or code file in its version folder. Raises InvalidArgument when there is none."""
    names = (filename,) if filename else SOURCES
    for name in names:
        path = version_dir / name
        if path.is_file():
            return path
    raise InvalidArgument(f"expected {' or '.join(names)} in '{version_dir.parent.name}/{version_dir.name}'")


def read(path: Path) -> Source:
    """Reads a .cu file and the headers it includes from its own folder."""
    folder = path.parent.resolve()
    files: dict[Path, File] = {}
    _take(folder / path.name, folder, files)
    return Source(path, tuple(files.values()))


def _take(where: Path, folder: Path, files: dict[Path, File]) -> None:
    """Adds a file, and those of the folder that it includes, to `files`."""
    if where in files:
        return
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"failed to read '{where.name}': {error}") from None
    files[where] = File(where.relative_to(folder).as_posix(), text)
    for match in _INCLUDE.finditer(blank_comments(text, strings=False)):
        for base in (where.parent, folder):
            header = (base / match.group(1)).resolve()
            if header.is_file() and header.is_relative_to(folder):
                _take(header, folder, files)
                break


_KEYWORDS = {
    "if",
    "for",
    "while",
    "switch",
    "catch",
    "return",
    "sizeof",
    "do",
    "else",
    "__launch_bounds__",
    "alignas",
}


def _bodies(code: str) -> list[tuple[str, str]]:
    """(name, body) of everything that looks like a function or a macro."""
    found = []
    for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:[^\n\\]|\\.|\\\n)*)", code, re.MULTILINE):
        found.append((match.group(1), match.group(2)))
    for match in re.finditer(r"\b([A-Za-z_]\w*)\s*\(", code):
        if match.group(1) in _KEYWORDS:
            continue
        end = closing(code, match.end() - 1)
        if end < 0:
            continue
        after = re.match(r"\s*(?:const\b|noexcept\b|->\s*[\w:<>*& ]+|\s)*\{", code[end + 1 :])
        if after:
            start = end + after.end()
            stop = closing(code, start, "{}")
            found.append((match.group(1), code[start : stop + 1 if stop > 0 else None]))
    return found
