"""Makes what a release consists of, in dist/: `make release`. Nothing is published, and nothing needs an account.

    python tools/release.py [VERSION ...] [--built] [--image NAME]

 1. The three places that hold the version agree (the package, the chart, the chart's image), or it ends.
 2. Wheels of these Pythons (all that tools/wheels.py knows when none is named) and the source distribution, each tried in an
    empty environment, with their bills of materials. --built takes those that lie in dist/ already.
 3. The Helm chart as helm packages it, made of the files that git knows, the same bytes each time.
 4. The container image, where there is buildah or a container engine: `image.txt` holds its name and digest.
 5. NOTES.md: the changelog's section of this version, or else the one of what is unreleased.
 6. SHA256SUMS of all of it.

The end names each part that is not there and why: an image without an engine, wheels of a Python that this machine has not, or
of another machine's architecture (run this there, with --built here once their files lie in dist/). The status is 0 where all that this machine can make was made.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_versions import interpreter
from wheels import VERSIONS

ROOT = Path(__file__).resolve().parent.parent
CHART = "deploy/helm/neptrio"
MACHINES = ("x86_64", "aarch64")
SUMS, NOTES, IMAGE = "SHA256SUMS", "NOTES.md", "image.txt"


def version(root: Path) -> str:
    """The version that all places agree on. Exits with the places where they do not."""
    places = {
        "pyproject.toml": r'^version = "([^"]+)"',
        "src/neptrio/__init__.py": r'^__version__ = "([^"]+)"',
        f"{CHART}/Chart.yaml": r"^version: ([\w.+-]+)",
        f"{CHART}/Chart.yaml ": r'^appVersion: "([^"]+)"',
    }
    found = {}
    for place, pattern in places.items():
        match = re.search(pattern, (root / place.strip()).read_text(), re.MULTILINE)
        found[place] = match[1] if match else "none"
    if len(set(found.values())) > 1:
        sys.exit(
            "the versions differ: " + ", ".join(f"{place.strip()} {said}" for place, said in found.items())
        )
    return found["pyproject.toml"]


def notes(changelog: str, wanted: str) -> str:
    """The changelog's section of that version, of what is unreleased where it has none. Exits where it has neither."""
    sections = dict(
        re.findall(
            r"^## \[?([^\]\n]+?)\]?(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
        )
    )
    text = sections.get(wanted) or sections.get("Unreleased")
    if not text or not text.strip():
        sys.exit(f"CHANGELOG.md has no section '## {wanted}', nor anything under '## Unreleased'")
    return f"# neptrio {wanted}\n\n{text.strip()}\n"


def chart(root: Path, target: Path, wanted: str) -> Path:
    """The chart's package. Owners, times and the order of files are fixed, so the same chart gives the same bytes."""
    listed = subprocess.run(["git", "ls-files", CHART], cwd=root, capture_output=True, text=True, check=True)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name in sorted(listed.stdout.split()):
            content = (root / name).read_bytes()
            entry = tarfile.TarInfo("neptrio/" + Path(name).relative_to(CHART).as_posix())
            entry.size, entry.mode = len(content), 0o644
            made.addfile(entry, io.BytesIO(content))
    file = target / f"neptrio-chart-{wanted}.tgz"
    file.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return file


def image(target: Path, wanted: str, name: str) -> str:
    """Builds the image and writes its name and digest. "" where that was done, else why not."""
    engine = next(filter(shutil.which, ("buildah", "podman", "docker")), None)
    if engine is None:
        return "no buildah, podman or docker here: make it where there is one"
    tag, digest = f"{name}:{wanted}", target / "image.digest"
    command = [
        engine,
        "build",
        "--iidfile",
        digest,
        "-f",
        ROOT / "deploy/container/Containerfile",
        "-t",
        tag,
        ROOT,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return f"{engine} could not build it: {''.join(said)}"
    (target / IMAGE).write_text(f"{tag}@{digest.read_text().strip()}\n")
    digest.unlink()
    return ""


def parts(target: Path, wanted: str) -> list[Path]:
    """The files of this release in `target`, sorted; none of another version."""
    mine = (f"neptrio-{wanted}-", f"neptrio-{wanted}.", f"neptrio-chart-{wanted}.")
    return sorted(
        file for file in target.iterdir() if file.name.startswith(mine) or file.name in (NOTES, IMAGE)
    )


def missing(files: list[Path]) -> list[str]:
    """What a whole release has and this one has not."""
    names = [file.name for file in files]
    wheels = [name for name in names if name.endswith(".whl")]
    lacks = []
    for machine in MACHINES:
        tags = {name.split("-")[2] for name in wheels if machine in name}
        without = [each for each in VERSIONS if f"cp{each.replace('.', '')}" not in tags]
        if not tags:
            lacks.append(f"wheels for {machine}")
        elif without:
            lacks.append(f"wheels for Python {', '.join(without)} on {machine}")
    lacks += [f"the bill of materials of {w}" for w in wheels if w.replace(".whl", ".cdx.json") not in names]
    if not any(name.endswith(".tar.gz") for name in names):
        lacks.append("the source distribution")
    return lacks + ([] if IMAGE in names else ["the image"])


def reason(lack: str, of_image: str, absent: list[str]) -> str:
    """Why that part is not there, in brackets; "" where this machine could make it. `absent`: Pythons that it has not."""
    if lack == "the image":
        return f" ({of_image})"
    if any(
        f"on {machine}" in lack or lack.endswith(machine)
        for machine in MACHINES
        if machine != platform.machine()
    ):
        return " (make them on such a machine, and put them into dist/ for --built)"
    of_these = [each for each in absent if each in lack]
    return f" (this machine has no Python {', '.join(of_these)})" if of_these else ""


def sums(files: list[Path]) -> str:
    """The content of SHA256SUMS, as `sha256sum --check` reads it."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="Pythons to build wheels for; all when none is given")
    parser.add_argument(
        "--built", action="store_true", help="take the wheels and the source that lie in dist/"
    )
    parser.add_argument(
        "--image", default="neptrio", metavar="NAME", help="the image's name, with its registry"
    )
    options = parser.parse_args()
    target = ROOT / "dist"
    target.mkdir(exist_ok=True)
    wanted = version(ROOT)
    text = notes((ROOT / "CHANGELOG.md").read_text(), wanted)
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    if changed:
        print("warning: the working tree has changes that no commit holds", flush=True)
    if not options.built:
        done = subprocess.run([sys.executable, ROOT / "tools" / "wheels.py", *options.versions], cwd=ROOT)
        if done.returncode:
            return done.returncode
    (target / NOTES).write_text(text)
    (target / IMAGE).unlink(missing_ok=True)
    chart(ROOT, target, wanted)
    why = image(target, wanted, options.image)
    files = parts(target, wanted)
    (target / SUMS).write_text(sums(files))
    for file in [*files, target / SUMS]:
        print(f"dist/{file.name}")
    absent = [each for each in VERSIONS if interpreter(each) is None]
    for lack in missing(files):
        print(f"not there: {lack}{reason(lack, why, absent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
