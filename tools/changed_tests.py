"""Prints the test files that belong to what has changed, for `make check`.

    python tools/changed_tests.py [--since COMMIT]

What has changed is what git sees since this branch left `main`, and what is not committed. A file's tests are, nearest first:

    1. itself, if it is one
    2. those that are named after it: src/neptrio/loop/outputs.py, cext/loop/outputs.pyx -> tests/loop/test_outputs*.py
    3. those that import it
    4. those that name its path in a text, such as tests of a document or a tool
    5. those that import it through other modules of tests/; without any so far, the files of its folder in tests/

They come with those that test the tree itself (tests/test_*.py that start no server). This is a choice for the minute
between two edits, not a proof: a change may break what is far from it, which `make test` finds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ("citations", "floors", "generated_code", "imports", "module_state", "stubs", "tree")
MOST = 40  # files: as many as half a minute holds; the nearest are kept
IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import ([^\n(]+|\([^)]*\))|import ([\w., ]+))", re.M)


def git(*words: str) -> list[str]:
    """The lines that git prints, or none where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed(since: str | None) -> list[str]:
    """Paths that differ from where this branch began, and new ones."""
    base = (
        [since]
        if since
        else next(filter(None, (git("merge-base", m, "HEAD") for m in ("main", "origin/main"))), ["HEAD"])
    )
    return sorted({*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    """`neptrio.loop.outputs` for src/neptrio/loop/outputs.py and cext/loop/outputs.pyx, "" for what is no module."""
    found = re.fullmatch(r"(src/|cext/|)(.+?)(/__init__)?\.(py|pyi|pyx|pxd)", path)
    if found is None:
        return ""
    return ("neptrio." if found[1] == "cext/" else "") + found[2].replace("/", ".")


def imported(text: str) -> set[str]:
    """Every dotted name that a file imports; of `from a import b` both `a` and `a.b`."""
    names = set()
    for package, members, plain in IMPORT.findall(text):
        if package:
            names.add(package)
            names |= {f"{package}.{member}" for member in re.findall(r"(\w+)(?: as \w+)?", members)}
        names |= {name.split()[0] for name in plain.split(",") if name.strip()}
    return names


class Suite:
    """The files of tests/ with what they import."""

    def __init__(self, root: Path) -> None:
        files = sorted(path.relative_to(root).as_posix() for path in root.glob("tests/**/*.py"))
        self._texts = {path: (root / path).read_text() for path in files}
        self._imports = {path: imported(text) for path, text in self._texts.items()}
        self.tests = [path for path in files if Path(path).name.startswith("test_")]

    def of(self, path: str) -> list[tuple[int, str]]:
        """(how far, test file) for each that belongs to a path."""
        if path in self.tests:
            return [(1, path)]
        module, stem = module_of(path), Path(path).stem.removesuffix("_core")
        package = re.sub(
            r"^(src/neptrio_(?=backends/)|(src/neptrio|src|cext)/)", "", Path(path).parent.as_posix()
        )
        folder = f"tests/{package}/"
        near = [
            (2, t) for t in self.tests if t.startswith(folder) and Path(t).name.startswith(f"test_{stem}")
        ]
        near += [(3, t) for t in self.tests if module in self._imports[t]]
        near += [(4, t) for t in self.tests if path in self._texts[t]]
        near += [(5, t) for t in self._importers(module)]
        if not near and module:
            near = [(5, t) for t in self.tests if t.startswith(folder)]
        return near

    def _importers(self, module: str) -> set[str]:
        """Tests that import a module, also through helpers in tests/."""
        seen: set[str] = set()
        wanted = {module} - {""}
        while wanted:
            found = {path for path, names in self._imports.items() if names & wanted} - seen
            seen |= found
            wanted = {module_of(path) for path in found - set(self.tests)}
        return seen & set(self.tests)


def chosen(paths: list[str], root: Path = ROOT) -> tuple[list[str], int]:
    """The test files of these paths, nearest first, and how many more there would be."""
    suite = Suite(root)
    distance: dict[str, int] = {}
    for path in paths:
        for far, test in suite.of(path):
            distance[test] = min(far, distance.get(test, far))
    nearest = sorted(distance, key=lambda test: (distance[test], test))
    tree = [f"tests/test_{name}.py" for name in TREE if (root / f"tests/test_{name}.py").exists()]
    return [*dict.fromkeys([*nearest[:MOST], *tree])], max(0, len(nearest) - MOST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", help="a commit to compare with (default: where this branch left main)")
    paths = changed(parser.parse_args().since)
    tests, left = chosen(paths)
    more = f", {left} further ones are left to `make test`" if left else ""
    print(f"{len(paths)} files changed: {len(tests)} files of tests{more}", file=sys.stderr)
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
