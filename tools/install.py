"""Installs what `make` needs into this Python's environment: the packages in requirements/, by their hashes.

    python tools/install.py GROUP...

A package whose hash is not in the file is refused, and so is one that would have to be built: nothing runs
while packages are installed. The files hold for the Pythons and systems named below. Elsewhere, and with
LOCK=no in the environment, pip chooses the newest versions that pyproject.toml allows, and the reason is
printed. It never happens because an installation failed: then the error stays.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import requirements

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
MACHINES = ("x86_64", "aarch64")
ALONE = ("examples",)  # installed without their dependencies
PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def not_locked(
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1]),
    system: str = sys.platform,
    machine: str = "",
    libc: str = "",
    wanted: str = "",
) -> str:
    """Why the lock is not used; "" when it is. `wanted` is the value of LOCK."""
    machine = machine or platform.machine()
    libc = libc or platform.libc_ver()[0]
    if wanted.lower() in ("no", "0", "false", "off"):
        return f"LOCK={wanted}"
    if python not in PYTHONS:
        return f"it has nothing for Python {python[0]}.{python[1]}"
    if system != "linux" or machine not in MACHINES or libc != "glibc":
        return f"it has nothing for {system} on {machine} with {libc or 'another C library than glibc'}"
    return ""


def files(group: str, gpu: bool) -> list[Path]:
    """The lock files of a group."""
    return [FOLDER / f"{name}.txt" for name in ([group, "cuda"] if group == "run" and gpu else [group])]


def main() -> int:
    reason = not_locked(wanted=os.environ.get("LOCK", ""))
    if reason:
        print(f"requirements/ is not used ({reason}): pip chooses what pyproject.toml allows", flush=True)
    for group in sys.argv[1:]:
        if reason:
            flags = ["--no-deps"] if group in ALONE else []
            lines = "\n".join(requirements.wanted(group))
            run = subprocess.run([*PIP, *flags, "-r", "/dev/stdin"], input=lines, text=True)
        else:
            chosen = [part for file in files(group, requirements.has_gpu()) for part in ("-r", str(file))]
            # the files are complete, so that pip has nothing to find out
            run = subprocess.run([*PIP, "--require-hashes", "--no-deps", "--only-binary=:all:", *chosen])
        if run.returncode:
            print(
                f"the packages of '{group}' could not be installed"
                + ("" if reason else "; LOCK=no installs others than those of requirements/")
            )
            return run.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
