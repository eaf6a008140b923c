"""Runs tests/ray with a real Ray, in an environment of its own.

    python tools/test_ray.py [ARGUMENTS OF PYTEST]

Ray is large, and what it needs would decide about the versions of the ordinary environment. The compiled modules are
those of the checkout: run `make build` first (`make test-ray` does).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import requirements  # noqa: E402

ENVIRONMENT = ROOT / "build" / "ray"
TESTS = ("pytest", "hypothesis", "tritonclient", "packaging")


def wanted() -> list[str]:
    """The requirements: what neptrio needs, the extra `ray`, and what these tests need."""
    tests = [text for text in requirements.wanted("test") if text.startswith(TESTS)]
    return [*requirements.wanted("run"), *requirements.wanted("ray"), *dict.fromkeys(tests)]


def environment() -> Path:
    """The environment's Python, made anew when the requirements have changed."""
    python = ENVIRONMENT / "bin" / "python"
    text = "\n".join([sys.version, *wanted(), ""])
    stamp = ENVIRONMENT / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != text:
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted()]
        subprocess.run(pip, check=True)
        (packages,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
        (packages / "neptrio-checkout.pth").write_text(f"{ROOT / 'src'}\n")
        stamp.write_text(text)
    return python


def main() -> int:
    arguments = sys.argv[1:]
    if not any(argument.startswith("tests") for argument in arguments):
        arguments = ["tests/ray", *arguments]
    variables = {**os.environ, "NEPTRIO_TEST_RAY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray and what it needs warn of each other
    command = [environment(), "-m", "pytest", "-p", "no:xdist", "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
