"""Pages for contributors: the files that they name are there, names are in their files, tables are whole."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path

import pytest

from neptrio import commands, flags, serving

ROOT = Path(__file__).resolve().parents[1]
ROOTS = (ROOT, ROOT / "src" / "neptrio", ROOT / "cext")
PAGES = sorted(
    [ROOT / "CONTRIBUTING.md"]
    + [
        ROOT / "docs" / f"{name}.md"
        for name in (
            "architecture",
            "compiled-code",
            "glossary",
            "request-fields",
            "suite",
            "where-to-change",
        )
    ]
)
# patterns and examples, which are no files
EXAMPLES = {
    "X.pyx",
    "X.pxd",
    "X.pyi",
    "X.h",
    "X.c",
    "tests/...",
    "gate.py",
    "latch.py",
    "model.py",
    "module.pyx",
    "module.pxd",
    "module.pyi",
    "module.py",
}


def found(path: str) -> list[Path]:
    return [root / path for root in ROOTS if (root / path).exists()]


def named(text: str) -> set[str]:
    """What stands in backticks and looks like a path: with a folder or one of our suffixes."""
    words = set(re.findall(r"`([\w./*-]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))
    return {
        word for word in words if re.search(r"\w\.(?:py|pyx|pxd|pyi|md|proto|toml|h)$|\w/$|^tests/", word)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    paths = {word for word in named(page.read_text()) - EXAMPLES if "*" not in word}
    assert {path for path in paths if not found(path)} == set()
    assert len(paths) > 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_are_in_the_files_that_are_said_to_have_them(page: Path) -> None:
    wrong = []
    for names, path in re.findall(
        r"((?:`\w+(?:\(\))?`(?:, | and )?)+) in `([\w./-]+\.\w+)`", page.read_text()
    ):
        for name in re.findall(r"`(\w+)", names):
            files = found(path)
            if not any(re.search(rf"\b{name}\b", file.read_text()) for file in files):
                wrong.append(f"{name} in {path}")
    assert wrong == []


def test_the_page_of_changes_has_its_names() -> None:
    text = (ROOT / "docs" / "where-to-change.md").read_text()
    assert len(re.findall(r"`\w+` in `", text)) > 20
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    assert len(rows) > 35
    assert [row for row in rows if row.count(" | ") != 2] == []


OLD = ("--strict-model-config", "--response-cache-byte-size")  # of older releases, which --help leaves out
OF_OTHERS = {  # programs that the pages call: docker, helm, pip, pytest, curl, nvcc, the project's own tools
    *("--build-arg", "--cap-drop", "--security-opt", "--tmpfs", "--set", "--require-hashes", "--only-binary"),
    *(
        "--no-build-isolation",
        "--no-deps",
        "--upgrade",
        "--dist",
        "--unix-socket",
        "--std",
        "--use_fast_math",
    ),
    *("--async", "--fresh", "--forms", "--keep", "--only", "--parts", "--rounds", "--save", "--servers"),
    *("--turns", "--unpinned", "--flag", "--models", "--tritonserver", "--python"),
}


def helps() -> list[str]:
    """The texts of --help: of the server, the subcommands, and the actions of `trace`."""
    found = [serving.parser().format_help()]
    for name in commands.names():
        parser = argparse.ArgumentParser()
        commands.load(name).add_arguments(parser)
        found.append(parser.format_help())
        for action in re.findall(r"^    ([a-z]+) ", found[-1], re.M) if name == "trace" else ():
            text = io.StringIO()
            with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
                parser.parse_args([action, "--help"])
            found.append(text.getvalue())
    return found


def test_pages_name_the_flags_that_there_are() -> None:
    """None that is not there, and none is left out; -o may stand for --output."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    named = {
        flag for page in pages for flag in re.findall(r"(?<![\w-])--?[a-z][a-z0-9_-]*", page.read_text())
    }
    there = [  # each with all its spellings
        set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9_-]*", option))
        for text in helps()
        for option in re.findall(r"^  (-.+?)(?:  |$)", text, re.M)
    ]
    assert {"--report"} in there and {"-o", "--output"} in there
    known = {*OF_OTHERS, *OLD, *flags.NO_EFFECT, *flags.MISSING}.union(*there)
    assert {flag for flag in named if flag.startswith("--")} - known == set()
    missing = [sorted(spelt) for spelt in there if not named & spelt]
    assert [spelt for spelt in missing if spelt not in (["--version"], ["--help", "-h"])] == []


def test_every_make_target_is_in_the_guide() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert targets - set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())) == set()


def test_every_field_of_a_request_has_its_row() -> None:
    source = (ROOT / "cext" / "request" / "infer_request.pxd").read_text()
    body = source.partition("cdef class InferRequest:")[2].partition("\ncdef class ")[0]
    fields = re.findall(r"^    cdef (?:public |readonly )?\w+ (\w+)", body, re.M)
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "request-fields.md").read_text(), re.M)
    told = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(fields) > 40
    assert sorted(told) == sorted(fields)


def test_the_glossary_is_in_order_and_has_one_line_for_each_word() -> None:
    words = re.findall(r"^\| ([a-z][^|]*) \| (?!means)", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(words) > 60
    assert words == sorted(set(words))
