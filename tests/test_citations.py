"""Facts of the protocol are cited as docs/protocol/PAGE.md SECTION, and every citation leads to a section that exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "protocol"
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
).stdout.split()
pytestmark = pytest.mark.skipif(not FILES, reason="not a git checkout")

SECTION = r"(?:E\d+(?:\.\d+)?|[AB]\d+|deviation \d+|\d+)(?![\w.]*\w)"
CITATION = re.compile(rf"docs/protocol/([\w-]+)\.md((?:(?:,? and|,| to|) {SECTION})*)")
RULE = re.compile(r"\bE[1-5]\.\d+\b")
# pages that do not lie in this tree
ELSEWHERE = re.compile(
    r"(?<!docs/protocol/)\b(?:rules|observed|features|trace-file)\.md|\bspec/|\bseeds?[ /]\d{3}\b"
)


def texts() -> Iterator[tuple[str, str]]:
    """Every text but docs/protocol and this file, with comments and docstrings joined to one line."""
    for name in FILES:
        path = ROOT / name
        if (
            name.startswith(("docs/protocol/", "tests/test_citations"))
            or not path.is_file()
            or path.is_symlink()
        ):
            continue
        if path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".md", ".h", ".proto", ".txt", ".toml"):
            yield name, re.sub(r"\s*\n[ \t]*(?:#|//)?[ \t]*", " ", path.read_text(encoding="utf-8"))


def sections(page: str) -> set[str]:
    """The ids that a page has: of its headings, of its rules, of its numbered items as `deviation N`."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^## ([A-Z]?\d+)\. ", text, re.M)) | set(
        re.findall(r"^- \*\*(E\d+\.\d+)\*\* ", text, re.M)
    )
    if page == "README":
        found |= {f"deviation {number}" for number in re.findall(r"^(\d+)\. ", text, re.M)}
    return found


def cited(text: str) -> Iterator[tuple[str, list[str]]]:
    """(page, sections) of each citation; `1 to 5` stands for all five."""
    for page, names in CITATION.findall(text):
        wanted = re.findall(SECTION, names)
        for first, last in re.findall(r"\b(\d+) to (\d+)", names):
            wanted += [str(number) for number in range(int(first), int(last) + 1)]
        yield page, wanted


def test_every_citation_leads_to_a_section() -> None:
    wrong = []
    count = 0
    for name, text in texts():
        for page, wanted in cited(text):
            count += 1
            if not (PAGES / f"{page}.md").exists():
                wrong.append(f"{name}: docs/protocol/{page}.md")
                continue
            missing = set(wanted) - sections(page)
            wrong += [f"{name}: docs/protocol/{page}.md {section}" for section in sorted(missing)]
    assert wrong == []
    assert count > 50, "the pattern no longer finds the citations"


def test_rules_that_are_cited_by_their_number_alone_exist() -> None:
    rules = sections("rules")
    wrong = [f"{name}: {rule}" for name, text in texts() for rule in RULE.findall(text) if rule not in rules]
    assert wrong == []


def test_nothing_outside_the_project_is_cited() -> None:
    wrong = [f"{name}: {match}" for name, text in texts() for match in ELSEWHERE.findall(text)]
    assert wrong == []


def test_every_page_of_facts_is_cited_and_listed() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")}
    assert {page for _, text in texts() for page, _ in cited(text)} >= pages
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert [page for page in sorted(pages - {"README"}) if f"]({page}.md)" not in index] == []


def test_the_pattern_reads_what_comments_write() -> None:
    text = "docs/protocol/rules.md E1.1, E1.9 and E1.10. docs/protocol/observed.md 1 to 3), docs/protocol/x.md, so"
    assert list(cited(text)) == [
        ("rules", ["E1.1", "E1.9", "E1.10"]),
        ("observed", ["1", "3", "1", "2", "3"]),
        ("x", []),
    ]


def test_every_deviation_says_who_notices_it() -> None:
    text = (PAGES / "README.md").read_text(encoding="utf-8").partition("## Decisions")[0]
    items = re.split(r"^\d+\. ", text, flags=re.M)[1:]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.M)]
    assert numbers == list(range(1, len(items) + 1)) and len(items) > 20
    for number, item in zip(numbers, items, strict=True):
        own = item.partition("\n\n")[0]
        assert re.search(r"\*[^*]+\.\*\s*\Z", own), f"deviation {number}"
