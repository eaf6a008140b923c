"""The rules with which modules open: numbered 1 to n, each once, and whoever cites one cites one that exists.

A module's rules are the numbered lines of its opening docstring, or opening comment (.pxd, .h, .c). Others cite them:

    (rule 3)                            of this very file, or of the .pyx beside a .pxd
    (loop.collector, rule 3)            of the file that is named, by as much of its path as tells it from others
    (rule 3 of cext/rings/ring)         the same; in the own package the file's name is enough
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".pyx", ".py", ".pxd", ".h", ".c")
FILES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    if name.endswith((*SUFFIXES, ".md")) and (ROOT / name).is_file() and name != "tests/test_rules.py"
]
pytestmark = pytest.mark.skipif(not FILES, reason="not a git checkout")

NAME = r"[A-Za-z_][\w./]*\w"
NUMBERS = r"\d+(?:(?:, | and | or | to )\d+)*"
CITATION = re.compile(rf"(?:({NAME})(?:'s|,)? )?\brules? ({NUMBERS})\b(?!\.\d)(?: of (?:the )?({NAME}))?")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def opening(name: str, text: str) -> str:
    """What a file says of itself before anything else."""
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text), clean=False) or ""
    patterns = {".pyx": r'\s*(?:#[^\n]*\n)*"""(.*?)"""', ".pxd": r"((?:#[^\n]*\n)+)"}
    pattern = patterns.get(Path(name).suffix, r"\s*(/\*.*?\*/|(?://[^\n]*\n)+)")
    match = re.match(pattern, text, re.S)
    return re.sub(r"^(?:#|//| \*(?= ))", "", match[1], flags=re.M) if match else ""


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^[ \t]*(\d{1,2})\. \S", text, re.M)]


@cache
def rules(name: str) -> tuple[int, ...]:
    return tuple(numbers(opening(name, read(name))))


@cache
def stems() -> dict[str, list[str]]:
    """The last part of a module's path -> all modules that end so, as paths without suffix."""
    found: dict[str, list[str]] = {}
    for name in FILES:
        if name.endswith(SUFFIXES):
            found.setdefault(Path(name).stem, []).append(name)
    return found


def named(word: str, by: str) -> list[str]:
    """The files that a citation in the file `by` means by a name."""
    path = re.sub(r"\.(?:pyx|pxd|py|h|c)$", "", word).replace(".", "/")
    fitting = [
        name
        for name in stems().get(path.rpartition("/")[2], ())
        if f"/{name.rpartition('.')[0]}".endswith(f"/{path}")
    ]
    package = by.rpartition("/")[0].removeprefix("cext/").removeprefix("src/neptrio/")
    near = [
        name
        for name in fitting
        if name.rpartition("/")[0].removeprefix("cext/").removeprefix("src/neptrio/") == package
    ]
    return near or fitting


def cited(text: str) -> Iterator[tuple[str | None, list[int], bool]]:
    """(name of a file or None, numbers, whether the word can be nothing else than a file) of each citation."""
    for match in CITATION.finditer(text):
        before, found, behind = match.groups()
        first, *_ = listed = [int(number) for number in re.findall(r"\d+", found)]
        if " to " in found:
            listed = list(range(first, listed[-1] + 1))
        begin = text[max(match.start() - 1, 0) : match.start()]
        name = behind or before
        # "(channel, rule 3)" and "rule 9 of channel" name a file; "as rule 4 says" and "only where rule 3" do not
        yield (
            name,
            listed,
            bool(behind) or bool(before and ((begin == "(" and "," in match[0]) or "/" in before)),
        )


def joined(name: str, text: str) -> str:
    """The text with comments and docstrings joined to one line each."""
    text = text.replace("`", "") if name.endswith(".md") else text
    return re.sub(r"\s*\n[ \t]*(?:#|//|\*(?= ))?[ \t]*", " ", text)


def wrong_citations(name: str, text: str) -> list[str]:
    wrong = []
    for word, wanted, surely in cited(joined(name, text)):
        files = named(word, name) if word else []
        said = ", ".join(map(str, wanted))
        if not files and surely:
            wrong.append(f"{name}: no file is called {word} (rule {said})")
            continue
        if not files:
            if name.endswith(".md"):
                continue
            files = [name, name.removesuffix(".pxd") + ".pyx"] if name.endswith(".pxd") else [name]
        has = [set(rules(file)) for file in files if (ROOT / file).is_file()]
        if not any(set(wanted) <= one for one in has):
            wrong.append(f"{name}: {' or '.join(files)} has no rule {said}")
    return wrong


def test_rules_are_numbered_from_one_each_once() -> None:
    wrong = {name: rules(name) for name in FILES if name.endswith(SUFFIXES)}
    wrong = {name: found for name, found in wrong.items() if list(found) != list(range(1, len(found) + 1))}
    assert wrong == {}
    assert sum(bool(rules(name)) for name in FILES if name.endswith(SUFFIXES)) > 150, (
        "the pattern finds no rules"
    )


def test_every_rule_that_is_cited_exists() -> None:
    texts = {name: read(name) for name in FILES if not name.startswith("docs/protocol/")}
    assert [line for name, text in texts.items() for line in wrong_citations(name, text)] == []
    found = sum(1 for name, text in texts.items() for _ in cited(joined(name, text)))
    assert found > 100, "the pattern no longer finds the citations"


def test_what_the_patterns_read() -> None:
    assert numbers('"""X.\n\nRules:\n 1. A, as in\n    section 4. B\n 2. C 3. D\n    2. E\n10. F\n"""') == [
        1,
        2,
        2,
        10,
    ]
    text = "does (rule 3), as rules 1 and 2 say (channel, rules 2 to 4), rule 9 of cext/rings/ring, E1.4; rule 7.2"
    assert [(name, found) for name, found, surely in cited(text) if surely] == [
        ("channel", [2, 3, 4]),
        ("cext/rings/ring", [9]),
    ]
    assert [found for _, found, surely in cited(text) if not surely] == [[3], [1, 2]]
    assert named("channel", "cext/frontend/engine_side.pyx") == [
        "cext/frontend/channel.pxd",
        "cext/frontend/channel.pyx",
    ]
    assert wrong_citations("cext/frontend/channel.pyx", "# see\n# rule 77") and wrong_citations(
        "cext/frontend/channel.pyx", "(no_such_file, rule 1)"
    )
