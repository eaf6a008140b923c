"""Builds what is published, and tries each of it in an empty environment.

    python tools/wheels.py [VERSION ...] [--no-sdist]

A wheel for each of Python 3.11 to 3.14 (those named, and of these what this machine has) and the source
distribution, into dist/. Every wheel is built by its own Python in an environment of build/wheels with the locked
packages; auditwheel puts libnghttp2 into it and names the oldest glibc that it runs on, which is decided by the machine
that builds: publish from one as old as the systems that are to be served. Then tools/wheel_test.py installs each into
an environment that has nothing else, without a compiler, and serves models from there; the source distribution is
built there from scratch, as pip does it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_versions import interpreter

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def quietly(log: Path, *command: str | Path, path: Path) -> None:
    """Runs a command with `path` first among the folders of programs; exits with its output where it fails."""
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    with log.open("ab") as out:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    if done.returncode:
        sys.exit(f"{log.read_text()[-4000:]}\nfailed: {' '.join(map(str, command))}")


def environment(version: str, python: str) -> Path:
    """The programs of an environment of that Python with what building needs."""
    binaries = FOLDER / version / "bin"
    if not (binaries / "python").exists():
        subprocess.run([python, "-m", "venv", binaries.parent], check=True)
    subprocess.run([binaries / "python", ROOT / "tools" / "install.py", "run", "wheel"], check=True)
    return binaries


def built(version: str, python: str) -> Path:
    """The wheel for that Python, in dist/."""
    binaries = environment(version, python)
    raw, log = FOLDER / f"raw-{version}", FOLDER / f"{version}.log"
    shutil.rmtree(raw, ignore_errors=True)
    log.unlink(missing_ok=True)
    own = binaries / "python"
    quietly(log, own, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw, ".", path=binaries)
    (plain,) = raw.glob("*.whl")
    tag = plain.name.split("-")[2]
    for old in (ROOT / "dist").glob(f"neptrio-*-{tag}-*"):
        old.unlink()
    quietly(log, binaries / "auditwheel", "repair", "--wheel-dir", ROOT / "dist", plain, path=binaries)
    (wheel,) = (ROOT / "dist").glob(f"neptrio-*-{tag}-*.whl")
    quietly(log, own, ROOT / "tools" / "sbom.py", wheel, path=binaries)
    return wheel


def source(binaries: Path) -> Path:
    """The source distribution, in dist/."""
    log = FOLDER / "sdist.log"
    log.unlink(missing_ok=True)
    for old in (ROOT / "dist").glob("neptrio-*.tar.gz"):
        old.unlink()
    own = binaries / "python"
    quietly(
        log, own, "-m", "build", "--sdist", "--no-isolation", "--outdir", ROOT / "dist", ".", path=binaries
    )
    (found,) = (ROOT / "dist").glob("neptrio-*.tar.gz")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help=f"of {', '.join(VERSIONS)}; all when none is given")
    parser.add_argument("--no-sdist", action="store_true", help="wheels only")
    options = parser.parse_args()
    unknown = set(options.versions) - set(VERSIONS)
    if unknown:
        parser.error(f"expected versions of {', '.join(VERSIONS)}, got {', '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (ROOT / "dist").mkdir(exist_ok=True)
    outcomes: dict[str, str] = {}
    made: list[tuple[str, Path, Path]] = []
    for version in options.versions or VERSIONS:
        python = interpreter(version)
        if python is None:
            outcomes[version] = f"not built: this machine has no Python {version}"
            continue
        print(f"Python {version}: building", flush=True)
        made.append((version, built(version, python), FOLDER / version / "bin"))
    if made and not options.no_sdist:
        # the newest Python that is here: it has the fewest wheels of others, so it shows most of what could be missing
        made.append(("sdist", source(made[-1][2]), made[-1][2]))
    for name, file, binaries in made:
        print(f"{name}: trying {file.name}", flush=True)
        done = subprocess.run([binaries / "python", ROOT / "tools" / "wheel_test.py", file], cwd=ROOT)
        outcomes[name] = file.name if done.returncode == 0 else f"failed: {file.name}"
    for name, outcome in outcomes.items():
        print(f"{name:<6} {outcome}")
    return int(not made or any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
