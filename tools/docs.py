"""Builds the documentation as a site that can be searched: `make docs`.

    python tools/docs.py [--serve ADDRESS]

The pages are those of the repository, as GitHub shows them; this copies them into build/docs/pages at the same places, so that their
links hold, and adds a page with the Python API's reference, made of docstrings. The menu is the list of pages in README.md.
The site is in build/docs/site: files for any web server (a browser shows them without one, but does not search). mkdocs-material and what
it needs (requirements/docs.txt) lie in an environment of their own, build/docs/venv. A link between pages that leads nowhere ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "docs"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+\.md)(?:#[\w-]+)?\)")
PLAIN = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)\s#]+)(?:#[\w-]+)?\)")
SHOWN = (".md", ".png", ".svg")
API = """# Python API: reference

Made of the docstrings. How the parts work together: [the server inside Python programs](docs/python-api.md).

{names}
"""


def sections(readme: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """README's list of pages: (group, [(title, file)])."""
    text = readme.partition("\n## Documentation\n")[2].partition("\n## ")[0]
    return [
        (block.partition("**\n")[0].strip("*\n "), [(title[:1].upper() + title[1:], file) for title, file in LINK.findall(block)])
        for block in re.split(r"\n+(?=\*\*)", text)
        if block.startswith("**")
    ]  # fmt: skip


def pages(readme: str) -> list[str]:
    """The Markdown files that the site has: README's, what they link to, and so on."""
    waiting, found = (
        ["README.md", "docs/README.md", *(f for _, rows in sections(readme) for _, f in rows)],
        [],
    )
    while waiting:
        name = waiting.pop(0)
        if name in found or not (ROOT / name).is_file():
            continue
        found.append(name)
        for _, target in LINK.findall((ROOT / name).read_text()):
            there = (ROOT / name).parent / target
            if "://" not in target and there.resolve().is_relative_to(ROOT):
                waiting.append(there.resolve().relative_to(ROOT).as_posix())
    return found


def rewritten(text: str, name: str) -> str:
    """A page whose links to what is no page (sources, folders) are plain text: the site does not have it."""
    kept = PLAIN.sub(lambda match: match[0] if match[2].endswith(SHOWN) else match[1], text)
    return kept if name != "README.md" else kept.replace("\n## Documentation\n", "\n## All pages\n")


def public() -> list[str]:
    """What `import neptrio` offers, read from the source: nothing is imported."""
    text = (ROOT / "src/neptrio/__init__.py").read_text()
    listed = re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return [name for name in re.findall(r'"(\w+)"', listed[1] if listed else "") if not name.startswith("_")]


def configuration(readme: str) -> dict[str, object]:
    """What mkdocs is told. JSON is YAML."""
    menu: list[object] = [{"neptrio": "README.md"}, {"Find a page by task": "docs/README.md"}]
    menu += [{group: [{title: file} for title, file in rows]} for group, rows in sections(readme)]
    menu.append({"Python API: reference": "api.md"})
    return {
        "site_name": "neptrio",
        "docs_dir": str(FOLDER / "pages"),
        "site_dir": str(FOLDER / "site"),
        "use_directory_urls": False,  # so that a browser shows the files themselves
        "nav": menu,
        "theme": {
            "name": "material",
            "font": False,  # nothing is fetched from elsewhere
            "features": ["navigation.indexes", "search.highlight", "content.code.copy", "toc.follow"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {
                "paths": [str(ROOT / "src")],
                "options": {"show_source": False, "show_root_heading": True, "heading_level": 2},
            }}}},
        ],
        "markdown_extensions": ["tables", "toc", "pymdownx.highlight", "pymdownx.superfences"],
        "validation": {"links": {"not_found": "warn", "anchors": "info"}, "nav": {"omitted_files": "ignore"}},
    }  # fmt: skip


def collect() -> None:
    """Writes the pages and the configuration."""
    readme = (ROOT / "README.md").read_text()
    shutil.rmtree(FOLDER / "pages", ignore_errors=True)
    for name in pages(readme):
        target = FOLDER / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten((ROOT / name).read_text(), name))
    for picture in [*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg")]:
        target = FOLDER / "pages" / picture.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    names = "\n\n".join(f"::: neptrio.{name}" for name in public())
    (FOLDER / "pages" / "api.md").write_text(API.format(names=names))
    (FOLDER / "mkdocs.yml").write_text(json.dumps(configuration(readme), indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", metavar="ADDRESS", help="show it at HOST:PORT")
    options = parser.parse_args()
    collect()
    python = FOLDER / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    subprocess.run([python, ROOT / "tools" / "install.py", "docs"], check=True)
    what = ["serve", "-a", options.serve] if options.serve else ["build", "--strict"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([python, "-m", "mkdocs", *what, "-f", FOLDER / "mkdocs.yml"], cwd=ROOT, env=env)
    if not done.returncode:
        print(FOLDER.relative_to(ROOT) / "site" / "index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
