"""Nobody is told to install this package by its name, which is on no index: whoever takes that name would be installed."""

from __future__ import annotations

import re
from pathlib import Path

from neptrio import extras

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = re.compile(r"(?:pip|uv) install [^\n`]*?(?<![\w./-])neptrio(?![\w.-]|/)")


def test_an_extra_is_the_packages_that_it_stands_for() -> None:
    assert extras.packages("openai") == ["jinja2<4,>=3.1"]
    assert extras.install("openvino") == "pip install 'openvino>=2024.4'"
    assert [re.split(r"\W", one)[0] for one in extras.packages("skops")] == ["treelite", "skops", "scikit"]
    assert extras.packages("no such extra") == []


def test_no_text_says_to_install_this_package_by_its_name() -> None:
    assert BY_NAME.search("pip install neptrio") and BY_NAME.search("pip install -U 'neptrio[onnx]'")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder, ends in (
        ("docs", ".md"),
        ("src", ".py"),
        ("src", ".js"),
        ("examples", ".py"),
        ("deploy", ""),
    ):
        files += [file for file in (ROOT / folder).rglob("*" + ends) if file.is_file()]
    found = []
    for file in files:
        if file.name == "extras.py" or file.suffix in (".png", ".so", ".pyc", ".tgz"):
            continue
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if BY_NAME.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
