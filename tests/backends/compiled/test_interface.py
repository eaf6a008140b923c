"""docs/compiled-backends.md says of every function what becomes of a call, and the library exports just those."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from neptrio.backends.compiled import host

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "compiled-backends.md"
CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.TRITONSERVER_ErrorMessage.restype = ctypes.c_char_p
for name in sys.argv[2:]:
    function = getattr(library, name)
    function.restype = ctypes.c_void_p
    error = ctypes.c_void_p(function())
    assert library.TRITONSERVER_ErrorCode(error) == 5, name
    assert library.TRITONSERVER_ErrorMessage(error).decode().startswith(name + " is not supported"), name
    library.TRITONSERVER_ErrorDelete(error)
"""


def table() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        row = re.fullmatch(r"\| [^|]+ \| (served|unsupported) \| (.+) \|", line)
        if row is not None:
            for name in re.findall(r"`(\w+)`", row[2]):
                assert name not in found, f"{name} stands there twice"
                found[name] = row[1]
    return found


def test_the_table_has_what_the_library_exports() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", host.library_path()], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    assert exported - {"neptrio_compiled_library", "neptrio_cache_serve"} == set(table())


def test_what_is_unsupported_says_so_by_its_name() -> None:
    names = [name for name, state in table().items() if state == "unsupported"]
    assert len(names) > 40
    subprocess.run([sys.executable, "-c", CALLS, host.library_path(), *names], check=True)


def test_what_is_served_is_called_by_the_tests() -> None:
    calls = "".join(path.read_text() for path in Path(__file__).parent.rglob("*.c"))
    names = [name for name, state in table().items() if state != "unsupported"]
    assert [name for name in names if re.search(rf"\b{name}\(", calls) is None] == []
