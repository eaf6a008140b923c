"""tools/docs.py: the pages of the site and its menu; and the programs in the pages for those who come from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\[[^\]]+\]\((?!\w+:|#)([^)\s#]+)")


def test_every_page_of_the_folder_is_in_the_site() -> None:
    found = set(docs.pages(README))
    missing = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "docs").rglob("*.md")
        if file.relative_to(ROOT).as_posix() not in found
    ]
    assert missing == [], "README.md, docs/README.md or a page that they lead to must link to it"


def test_links_of_the_sites_pages_lead_somewhere() -> None:
    lost = []
    for name in docs.pages(README):
        for target in LINK.findall(docs.rewritten((ROOT / name).read_text(), name)):
            if not ((ROOT / name).parent / target).is_file():
                lost.append(f"{name}: {target}")
    assert lost == []


def test_the_menu_has_the_readmes_groups_and_the_reference_the_public_names() -> None:
    menu = docs.configuration(README)["nav"]
    assert isinstance(menu, list)
    groups = [name for entry in menu for name in entry]
    assert groups[2] == "Start" and "Secure" in groups and groups[-1].startswith("Python API")
    assert {"From BentoML": "docs/from-bentoml.md"} in menu[2]["Start"]
    assert {"Server", "InvalidArgument"} <= set(docs.public())


def test_a_link_to_a_source_file_is_text_in_the_site() -> None:
    assert (
        docs.rewritten("see [this](../src/x.py) and [that](http.md#a)", "docs/x.md")
        == "see this and [that](http.md#a)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("page", "printed"), [("from-pytriton", "[[5.]]"), ("from-bentoml", "[[4. 4.]]")])
def test_the_program_of_a_page_runs_as_pasted(page: str, printed: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (tmp_path / "app.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == printed, done.stderr
