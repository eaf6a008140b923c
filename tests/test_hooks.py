"""What the compiled code of the transports calls or reads on its objects is declared: in their class, or in one that it extends.

A compiled class finds a name that it does not declare at run time, in a Python subclass or nowhere: whoever reads it does not
learn what such a subclass has to say, and a renamed method is noticed by the first client that needs it.
"""

from __future__ import annotations

import re
from pathlib import Path

CEXT = Path(__file__).resolve().parents[1] / "cext"
CLASS = re.compile(r"cdef class (\w+)(?:\((?:\w+\.)*(\w+)\))?:")
METHOD = re.compile(r"\s+(?:async )?(?:def|cpdef|cdef)\b[^(=]*?(\w+)\(")
FIELD = re.compile(r"\s+cdef\b([^(=#]*)$")
OWN = re.compile(r"\bself\.(\w+)")
CONNECTION = re.compile(r"\b(?:self\._?)?connection\.(\w+)")
CONNECTION_FIELD = re.compile(r"(\w+) _?connection$")


class Declared:
    """What all compiled classes declare."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self.bases: dict[str, str] = {}
        self.connections: dict[str, str] = {}  # the class of a class's connection

    def read(self, text: str) -> None:
        """Adds what the classes of a source declare."""
        name = ""
        for line in text.splitlines():
            found = CLASS.match(line)
            if found is not None:
                name = found[1]
                self.names.setdefault(name, set())
                if found[2]:
                    self.bases[name] = found[2]
            elif line[:1].strip() and not line.startswith("#"):
                name = ""
            elif name:
                code = line.partition("#")[0].rstrip()
                method, field = METHOD.match(code), FIELD.match(code)
                if method is not None:
                    self.names[name].add(method[1])
                elif field is not None:
                    self.names[name].update(re.findall(r"(\w+)\s*(?:,|$)", field[1].split("]")[-1]))
                    connection = CONNECTION_FIELD.search(field[1])
                    if connection is not None:
                        self.connections[name] = connection[1]

    def connection_of(self, name: str) -> str | None:
        """The class of a class's connection, None if it has none."""
        while name and name not in self.connections:
            name = self.bases.get(name, "")
        return self.connections.get(name)

    def has(self, name: str, wanted: str) -> bool:
        """Whether a class or one that it extends declares a name."""
        while name in self.names:
            if wanted in self.names[name]:
                return True
            name = self.bases.get(name, "")
        return False


def code_of_classes(text: str) -> list[tuple[str, str]]:
    """The lines of compiled classes that are no docstrings, each with its class."""
    found, name, quoted = [], "", False
    for line in text.splitlines():
        matched = CLASS.match(line)
        if matched is not None:
            name = matched[1]
        elif line[:1].strip() and not line.startswith(("#", '"')):
            name = ""
        code = line.partition("  #")[0]
        if code.count('"""') % 2:
            quoted = not quoted
        elif name and not quoted and '"""' not in code:
            found.append((name, code))
    return found


def test_what_compiled_code_uses_is_declared() -> None:
    known = Declared()
    for path in (*sorted(CEXT.rglob("*.pyx")), *CEXT.rglob("*.pxd")):
        known.read(path.read_text())
    missing: set[str] = set()
    uses = 0
    for path in CEXT.glob("transport/*/*.pyx"):
        for name, code in code_of_classes(path.read_text()):
            wanted = [(name, each) for each in OWN.findall(code)]
            connection = known.connection_of(name)
            if connection is not None:
                wanted += [(connection, each) for each in CONNECTION.findall(code)]
            uses += len(wanted)
            missing |= {f"{path.name}: {of}.{each}" for of, each in wanted if not known.has(of, each)}
    assert uses > 500
    assert not missing, "\n".join(sorted(missing))
