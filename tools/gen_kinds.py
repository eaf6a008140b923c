"""Writes cext/rings/kinds.pxd from the list of what crosses on rings, triton_python_backend_utils/_process/kinds.py.

    python tools/gen_kinds.py [--check]

The list is in Python because a model's interpreter, which cannot load compiled modules, reads it as it is. `--check` writes
nothing; its exit status says whether the file is current.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "src" / "triton_python_backend_utils" / "_process" / "kinds.py"
MADE = ROOT / "cext" / "rings" / "kinds.pxd"
MEMBER = re.compile(r"(\w+ = \d+)(?:  (#.*))?$")


def made(source: str) -> str:
    """The text of kinds.pxd."""
    tree = ast.parse(source)
    where = "triton_python_backend_utils/_process/kinds.py"
    lines = [f"# The kinds of {where}, which says what they mean; made by tools/gen_kinds.py."]
    for line in source.split("from __future__ import annotations\n", 1)[1].split("\n"):
        member = MEMBER.match(line)
        if line.startswith("# enum"):
            name = line[len("# enum") :]
            lines += ["", f"cdef enum{name}:"]
        elif member is not None:
            text, comment = member.groups()
            lines.append(f"    {text:<20} {comment}" if comment else f"    {text}")
        elif line.startswith("#"):
            lines.append("    " + line)
    top = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TOP"
    )
    bit = ast.literal_eval(top.right)  # type: ignore[attr-defined]  # 1 << so many
    lines += [
        "",
        "cdef extern from *:",
        '    """',
        f"    #define RING_TOP (1ULL << {bit})",
        '    """',
        '    const unsigned long long OWN "RING_TOP"     # in Entry.offset: it is a segment\'s number',
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    text = made(LIST.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--check"]:
        if MADE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{MADE.relative_to(ROOT)} is stale: run tools/gen_kinds.py", file=sys.stderr)
        return 1
    MADE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
