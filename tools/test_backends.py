"""Runs the tests of backends whose packages are large, in an environment of their own: `make test-backends`.

    python tools/test_backends.py [arguments of pytest]

The environment is build/backends-environment. It has PyTorch and transformers, and sees the packages that testing the server needs, this
checkout among them. It is kept, and made anew when the requirements have changed. PyTorch is the newest that pyproject.toml
allows and pip finds; one for the CPU is enough, and a fifteenth of the size where pip's own settings lead to one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import requirements

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/backends/pytorch", "tests/backends/transformers", "tests/repository/test_drop_in_formats.py")
ENVIRONMENT = ROOT / "build" / "backends-environment"


def environment() -> Path:
    """The environment's Python, made anew when the requirements have changed."""
    python = ENVIRONMENT / "bin" / "python"
    wanted = requirements.wanted("transformers")
    text = "\n".join([sys.version, *wanted, ""])
    stamp = ENVIRONMENT / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != text:
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted]
        subprocess.run(pip, check=True)
        (packages,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
        # behind the environment's own packages: numpy is the one that PyTorch was installed with
        shared = (ROOT / "src", sysconfig.get_path("purelib"))
        (packages / "checkout.pth").write_text("".join(f"{folder}\n" for folder in shared))
        stamp.write_text(text)
    return python


def main() -> int:
    arguments = sys.argv[1:]
    if not any(argument.startswith("tests") for argument in arguments):
        arguments = [*TESTS, *arguments]
    command = [environment(), "-m", "pytest", "-p", "no:xdist", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
