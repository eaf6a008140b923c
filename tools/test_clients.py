"""Runs other people's clients against a live server (`make test-clients`).

    python tools/test_clients.py [PYTEST ARGUMENT ...]

The clients of PyPI have an environment of their own in build/clients, because their requirements are not ours: they
install what they please, and the server that they talk to runs in the project's. The clients of npm lie beside their
package.json in tests/clients/node; where there is no Node, their tests are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "clients"
NODE = ROOT / "tests" / "clients" / "node"


def stale(mark: Path, *sources: Path) -> bool:
    """Whether something has changed since `mark` was made."""
    return not mark.exists() or any(source.stat().st_mtime > mark.stat().st_mtime for source in sources)


def environment() -> Path:
    """The interpreter of the environment with the clients of requirements/clients.txt."""
    python = FOLDER / "bin" / "python"
    mark = FOLDER / ".installed"
    if stale(mark, ROOT / "requirements" / "clients.txt"):
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        subprocess.run([python, ROOT / "tools" / "install.py", "clients"], check=True)
        mark.touch()
    return python


def packages() -> None:
    """Installs the clients of package-lock.json, if there is an npm."""
    npm = shutil.which("npm")
    if npm is None or not (NODE / "package.json").exists():
        return
    mark = NODE / "node_modules" / ".package-lock.json"
    if stale(mark, NODE / "package-lock.json"):
        subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"], cwd=NODE, check=True
        )
        mark.touch()


def main() -> int:
    python = environment()
    packages()
    command = [
        python,
        "-m",
        "pytest",
        "--confcutdir=tests/clients",
        "-rs",
        *(sys.argv[1:] or ["tests/clients"]),
    ]
    # the clients warn as they please, and what they leave open is theirs
    command += ["-o", "addopts=-q -p no:cacheprovider", "-o", "filterwarnings="]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NEPTRIO_TEST_PYTHON": sys.executable}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
