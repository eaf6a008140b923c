"""Writes requirements/*.txt: the exact packages, with their hashes, that `make` installs (`make lock`).

    python tools/lock.py [--upgrade]

pyproject.toml says which versions are possible, these files which ones are taken. All groups are resolved
together first, so that no two files disagree about a package. Then each group is resolved within that, and
its file gets what the groups below it lack:

    run       building and running
      trees, openvino   serving tree ensembles, and networks of OpenVINO
      cuda      on machines with an NVIDIA driver
        gpu     testing on such a machine that has no network: tools/gpu_wheels.py
      examples  the packages whose models the example repository uses; without their dependencies
      wheel     building wheels
      test      testing
        fuzz, deploy, audit, lock   the tools of the make targets with these names
    clients   other people's clients, for `make test-clients`, in an environment of their own and resolved alone
    docs      the site of the documentation, likewise
    pytorch   serving PyTorch's models; resolved beside `run` only, since it asks for libraries of CUDA in other versions
      transformers   serving folders of Hugging Face models

Versions stay as they are in the files while pyproject.toml allows them; --upgrade takes the newest. The
resolution is uv's; it is made for every system, so one file holds for all of them. Hashes are those that the
package index gives, and the files do not say which index that was. At the end uv is asked whether there is a wheel
of everything for each of the Pythons and machines that tools/install.py uses the files for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import install

import requirements

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
OLDEST = "3.11"
GLIBC = {
    "x86_64": "manylinux_2_28",
    "aarch64": "manylinux_2_35",
}  # OpenVINO, which the tests use, asks for the latter
RUNNING = dict.fromkeys(GLIBC, "manylinux_2_28")  # running the server needs no more
# group -> the groups that are installed before it
BELOW: dict[str, tuple[str, ...]] = {
    "run": (),
    "trees": ("run",),
    "openvino": ("run",),
    "pytorch": ("run",),
    "transformers": ("run", "pytorch"),
    "cuda": ("run",),
    "gpu": ("run", "cuda"),
    "examples": (),
    "test": ("run",),
    "fuzz": ("run", "test"),
    "wheel": ("run",),
    "deploy": ("run", "test"),
    "audit": ("run", "test"),
    "lock": ("run", "test"),
    "clients": (),
    "docs": (),
}
ALONE = ("examples",)  # whose dependencies are left out
APART = ("clients", "docs", "pytorch", "transformers")  # resolved without the others, except those below them


def entries(text: str) -> dict[str, str]:
    """The requirements of a lock file, each with its hashes: `name==version ; marker` -> the whole text."""
    found = {}
    for entry in re.split(r"\n(?=\S)", "\n" + text):
        head = entry.strip().partition(" \\")[0].strip()
        if head and not head.startswith("#"):
            found[head] = entry.strip("\n")
    return found


def compiled(wanted: list[str], output: Path, *flags: str) -> dict[str, str]:
    """What uv resolves the requirements to. Versions in `output`, which is overwritten, are preferred."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "-q", "--universal", f"--python-version={OLDEST}",
        "--generate-hashes", "--no-header", "--no-annotate", "--only-binary=:all:", *flags, "-o", output, "-",
    ]  # fmt: skip
    run = subprocess.run(command, input="\n".join(wanted), text=True, capture_output=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return entries(output.read_text())


def without_wheels(
    groups: dict[str, dict[str, str]], folder: Path, glibc: dict[str, str] = GLIBC
) -> list[str]:
    """What uv says where a package has no wheel that fits, for each Python and machine."""
    file = folder / "everything.txt"
    file.write_text(
        "\n".join({head: text for group in groups.values() for head, text in group.items()}.values())
    )
    found = []
    for major, minor in install.PYTHONS:
        for machine in install.MACHINES:
            run = subprocess.run(
                [
                    sys.executable, "-m", "uv", "pip", "install", "-q", "--dry-run", "--no-deps", "--require-hashes",
                    "--only-binary=:all:", f"--python-version={major}.{minor}",
                    f"--python-platform={machine}-{glibc[machine]}", f"--target={folder}/nothing", "-r", file,
                ],
                text=True,
                capture_output=True,
            )  # fmt: skip
            if run.returncode:
                found.append(f"Python {major}.{minor} on {machine}: {run.stderr.strip()}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        together, scratch = Path(name) / "all.txt", Path(name) / "group.txt"
        kept: dict[str, str] = {}
        if not options.upgrade:
            for file in (file for file in FOLDER.glob("*.txt") if file.stem not in APART):
                kept |= entries(file.read_text())
        together.write_text("\n".join(kept.values()))
        wanted = {group: requirements.wanted(group, gpu=False) for group in BELOW}
        compiled(
            [line for group in BELOW if group not in (*ALONE, *APART) for line in wanted[group]], together
        )
        groups: dict[str, dict[str, str]] = {}
        for group, below in BELOW.items():
            scratch.unlink(missing_ok=True)
            flags = ["--no-deps"] if group in ALONE else ["-c", str(together)]
            if group in APART:
                beneath = Path(name) / "below.txt"
                beneath.write_text("\n".join(text for other in below for text in groups[other].values()))
                flags = ["-c", str(beneath)] if below else []
                if not options.upgrade and (FOLDER / f"{group}.txt").exists():
                    scratch.write_text((FOLDER / f"{group}.txt").read_text())
            # what is installed already, perhaps only in a narrower case: then it is listed again
            had = {head for other in below for head in groups[other]}
            groups[group] = compiled(wanted[group], scratch, *flags)
            own = [
                text
                for head, text in sorted(groups[group].items())
                if head not in had and head.partition(" ;")[0] not in had
            ]
            (FOLDER / f"{group}.txt").write_text("\n".join(own) + "\n")
            print(f"requirements/{group}.txt: {len(own)} packages")
        problems = without_wheels({"run": groups["run"]}, Path(name), RUNNING)
        problems += without_wheels({g: found for g, found in groups.items() if g not in APART}, Path(name))
        for group in APART:
            problems += without_wheels({g: groups[g] for g in (*BELOW[group], group)}, Path(name))
    if problems:
        print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
