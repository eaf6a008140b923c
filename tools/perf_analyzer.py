"""Fetches perf_analyzer, the load generator that Triton's users know, into build/perf_analyzer.

    python tools/perf_analyzer.py [ARGUMENT ...]     fetches it where necessary, and runs it

The package perf_analyzer of PyPI holds nothing. The program itself is in the wheels of tritonclient up to 2.47 (Linux on
x86-64), and needs two libraries that it does not bring: libcudart, from PyPI too, and Debian's libb64, which is unpacked
here without being installed. Everything is pinned and checked by its hash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "perf_analyzer"
PROGRAM = FOLDER / "perf_analyzer"
WHEELS = (
    (
        "tritonclient==2.47.0",
        "754ab373a45306be0c45afbcde06838179d04561694f6d15e138530153aee581",
        ("bin/perf_analyzer",),
    ),
    (
        "nvidia-cuda-runtime-cu12==12.9.79",
        "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
        ("libcudart.so.12",),
    ),
)
LIBRARY = "libb64.so.0d"


class Missing(Exception):
    """It cannot be had on this machine; the text says why."""


def _run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-300:]}")


def _take(wheel: Path, names: tuple[str, ...], folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            member = next(entry for entry in archive.namelist() if entry.endswith(name))
            target = folder / Path(name).name
            target.write_bytes(archive.read(member))
            target.chmod(0o755)


def _unpack_libb64(folder: Path, scratch: Path) -> None:
    """Debian's library: unpacked, not installed, so nobody has to be root."""
    if any((place / LIBRARY).exists() for place in map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"))):
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Missing(f"{LIBRARY} is not installed, and this is no Debian to fetch it from (libb64-0d)")
    _run("apt-get", "download", "-qq", "libb64-0d", cwd=scratch)
    _run("dpkg-deb", "-x", next(scratch.glob("libb64*.deb")), scratch / "unpacked", cwd=scratch)
    for found in (scratch / "unpacked").rglob(f"{LIBRARY}*"):
        shutil.copy(found, folder / found.name)


def fetch() -> Path:
    """The program, fetched at the first call. Raises Missing."""
    if PROGRAM.exists():
        return PROGRAM
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Missing("perf_analyzer is there for Linux on x86-64 only")
    with tempfile.TemporaryDirectory() as name:
        scratch, made = Path(name), Path(name) / "made"
        made.mkdir()
        wanted = scratch / "wanted.txt"
        wanted.write_text("".join(f"{pin} --hash=sha256:{digest}\n" for pin, digest, _ in WHEELS))
        _run(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
            "--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64",
            "--disable-pip-version-check", "--require-hashes", "-r", wanted, cwd=scratch,
        )  # fmt: skip
        for pin, _digest, names in WHEELS:
            stem = pin.partition("==")[0].replace("-", "_")
            _take(next(scratch.glob(f"{stem}-*.whl")), names, made)
        _unpack_libb64(made, scratch)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.parent.mkdir(exist_ok=True)
        shutil.copytree(made, FOLDER)
    return PROGRAM


def environment() -> dict[str, str]:
    """The environment in which the program finds its libraries."""
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER)}


if __name__ == "__main__":
    try:
        program = fetch()
    except Missing as error:
        sys.exit(f"perf_analyzer cannot be had here: {error}")
    os.execve(program, [str(program), *sys.argv[1:]], environment())
