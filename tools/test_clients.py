"""Runs other people's clients against a live server (`make test-clients`).

    python tools/test_clients.py [PYTEST ARGUMENT ...]

The clients of PyPI have an environment of their own in build/clients, because their requirements are not ours: they
install what they please, and the server that they talk to runs in the project's. The clients of npm lie beside their
package.json in tests/clients/node; where there is no Node, or npm reaches no registry, their tests are
skipped and say so.
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


def environment() -> Path:
    """The interpreter of the environment with the clients of requirements/clients.txt."""
    python = FOLDER / "bin" / "python"
    mark = FOLDER / "installed.txt"
    wanted = (ROOT / "requirements" / "clients.txt").read_text()
    if not mark.exists() or mark.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        # most of what is installed is never imported
        environment = {**os.environ, "PIP_NO_COMPILE": "1"}
        subprocess.run([python, ROOT / "tools" / "install.py", "clients"], check=True, env=environment)
        mark.write_text(wanted)
    return python


def packages() -> None:
    """Installs the clients of package-lock.json, if there is an npm."""
    npm = shutil.which("npm")
    if npm is None:
        return
    mark = NODE / "node_modules" / "installed.txt"
    wanted = (NODE / "package-lock.json").read_text()
    if not mark.exists() or mark.read_text() != wanted:
        flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
        if subprocess.run([npm, "ci", *flags], cwd=NODE).returncode == 0:
            mark.write_text(wanted)
        else:
            print("npm cannot install the clients for Node: their tests are skipped")


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
