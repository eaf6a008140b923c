"""Code that a server runs before its own: what Python imports at its start (sitecustomize)."""

from __future__ import annotations

import os
from pathlib import Path


def with_site(folder: Path, text: str) -> dict[str, str]:
    """The environment of a server that runs `text` first; `folder` is for its file."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(text)
    paths = [f"{folder / 'site'}", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
