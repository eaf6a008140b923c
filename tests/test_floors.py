"""Packages depend in one direction: imports of Python modules and stubs and cimports of Cython ones, counted alike.

FLOORS is the table: a module may import from its own package and from what stands on a lower line,
never from its own line or above. Imports under TYPE_CHECKING and inside functions count too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# from the ground up; a package stands for its modules, unless a line names one of them
FLOORS = """
extras limits
foreign
errors datatypes cores process_parts terminal
process_end process_start
request
rings
loop
codec
observe
config
execution
scheduling
storage_uri
addresses flags
settings
logs
backends
repository
service console
transport
transport.tls transport.header_policy transport.host_header transport.origin_policy transport.reservation
transport.accept transport.admin_only transport.connection transport.infer_call transport.unix_socket
transport.http2 transport.port_server
transport.grpc
transport.rest
transport.http1
transport.hypercorn
transport.console transport.rest_server
transport.metrics_server
transport.admin_server
frontend
client
traces sweep
commands
startup
server
server_process
serving
embedded
compat importing ray testing
commands.demo commands.import commands.serve
cli
__main__
"""
FLOOR_OF = {name: number for number, line in enumerate(FLOORS.split("\n")) for name in line.split()}
CIMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import\s+(.+)|c?import\s+(.+))$")


def sources() -> dict[str, list[Path]]:
    """Module name, without the leading `neptrio.`, -> its files."""
    found: dict[str, list[Path]] = {}
    for root, patterns in (
        (ROOT / "src" / "neptrio", ("*.py", "*.pyi")),
        (ROOT / "cext", ("*.pyx", "*.pxd")),
    ):
        for pattern in patterns:
            for path in root.rglob(pattern):
                if "_proto" in path.parts:
                    continue
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found.setdefault(name, []).append(path)
    return found


def imported(path: Path) -> set[str]:
    """Full names that a file imports, `module.attribute` where it says `from module import attribute`."""
    text = path.read_text()
    found: set[str] = set()
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative imports hide where a module stands"
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found
    joined = re.sub(r"\(([^()]*)\)", lambda match: match[1].replace("\n", " "), text)
    for line in joined.split("\n"):
        match = CIMPORT.match(line.split("#")[0].rstrip())
        if match is None:
            continue
        base, names, modules = match.groups()
        for item in (names or modules).split(","):
            item = item.split(" as ")[0].strip()
            if item:
                found.add(f"{base}.{item}" if base else item)
    return found


def module_of(name: str, known: dict[str, list[Path]]) -> str | None:
    """The module of ours that a full name belongs to."""
    if not name.startswith("neptrio."):
        return None
    name = name.removeprefix("neptrio.")
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def floor(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    name = module
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    assert name, f"module {module} has no floor: give its package a place in FLOORS"
    return name


def test_no_package_depends_on_one_above_it() -> None:
    known = sources()
    wrong = []
    for module, paths in known.items():
        if not module:
            continue
        here = floor(module)
        for path in paths:
            for name in imported(path):
                target = module_of(name, known)
                if target is None or target == module:
                    continue
                there = floor(target)
                if there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
                    wrong.append(f"{path.relative_to(ROOT)}: {here} imports {name}, which stands on {there}")
    assert sorted(set(wrong)) == []


def test_every_floor_is_somebodys() -> None:
    assert set(FLOOR_OF) == {floor(module) for module in sources() if module}


def test_cython_sources_lie_where_their_package_is() -> None:
    """cext/ mirrors src/neptrio/, and no module is there twice."""
    known = sources()
    for module, paths in known.items():
        suffixes = {path.suffix for path in paths}
        assert not {".py", ".pyx"} <= suffixes, f"{module} is there in Python and in Cython"
        if ".pyx" in suffixes:
            package = ROOT / "src" / "neptrio" / Path(*module.split(".")[:-1])
            assert (package / "__init__.py").is_file(), f"{module} has no package in src/neptrio"


PAGE = ROOT / "docs" / "architecture.md"


def test_the_page_on_the_architecture_shows_these_floors() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition("<!-- floors: begin -->\n")[2].partition("<!-- floors: end -->")[0]
    assert shown == f"```\n{FLOORS.strip()}\n```\n", f"copy FLOORS to {PAGE.relative_to(ROOT)}"


def test_the_page_on_the_architecture_names_modules_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|pyx|pxd))`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50, "the pattern no longer finds the paths"
    folders = {".py": (ROOT / "src" / "neptrio", ROOT), ".pyx": (ROOT / "cext",), ".pxd": (ROOT / "cext",)}
    # a model's file lies in a model repository
    wrong = [
        name
        for name in sorted(set(named) - {"model.py"})
        if not any((folder / name).is_file() for folder in folders[Path(name).suffix])
    ]
    assert wrong == []
