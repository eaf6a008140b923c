"""Fetches the wheels that tools/gpu_run.sh needs on a machine without a network.

    python tools/gpu_wheels.py [--python 3.12] [--machine x86_64] [--without NAME ...] [--without-cuda] [--into FOLDER]

They are those of requirements/run.txt, cuda.txt and gpu.txt for that Python and machine, checked by their hashes.
FOLDER (build/gpu-wheels) then has these and no others. What the GPU machine has already can be left out: NVRTC alone is
56 MiB. CUDA's packages belong together, so they are left out together, with --without-cuda.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

sys.path.insert(0, str(Path(__file__).parent))
import lock

GROUPS = ("run", "gpu")
CUDA = "cuda"
NEWEST_GLIBC = 39  # of 2.x: of the machine that the wheels are for


def wanted(python: str, machine: str, without: list[str], cuda: bool = True) -> dict[str, str]:
    """Package -> its entry of the lock, without the condition; `cuda`: with CUDA's packages. Raises SystemExit for a name that is not in the lock."""
    variables = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for group in (*GROUPS, CUDA) if cuda else GROUPS:
        for head, text in lock.entries((lock.FOLDER / f"{group}.txt").read_text()).items():
            requirement = Requirement(head)
            if requirement.marker is None or requirement.marker.evaluate(variables):
                found[canonicalize_name(requirement.name)] = text.replace(head, head.partition(" ;")[0], 1)
    for name in without:
        if found.pop(canonicalize_name(name), None) is None:
            raise SystemExit(f"'{name}' is none of the packages: {', '.join(sorted(found))}")
    return found


def platforms(machine: str) -> list[str]:
    """pip's flags for every tag of a wheel that runs there; pip takes no range of them."""
    old = ["manylinux1", "manylinux2010", "manylinux2014"]
    tags = [*old, *(f"manylinux_2_{minor}" for minor in range(5, NEWEST_GLIBC + 1)), "linux"]
    return [f"--platform={tag}_{machine}" for tag in tags]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python")
    parser.add_argument("--machine", default="x86_64", help="its processor, x86_64 or aarch64")
    parser.add_argument(
        "--without", nargs="+", action="extend", default=[], metavar="NAME", help="packages that it has"
    )
    parser.add_argument("--without-cuda", action="store_true", help="it has cuda-bindings, NVRTC and headers")
    parser.add_argument(
        "--into", type=Path, default=Path(__file__).resolve().parent.parent / "build/gpu-wheels"
    )
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    packages = wanted(options.python, options.machine, options.without, not options.without_cuda)
    options.into.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages.values()) + "\n")
        file.flush()
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
            "--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={options.python}",
            *platforms(options.machine), "-d", str(options.into), "-r", file.name,
        ]  # fmt: skip
        if subprocess.run(command).returncode:
            return 1
    versions = {name: Requirement(text.partition(" \\")[0]).specifier for name, text in packages.items()}
    kept: dict[str, int] = {}
    for wheel in sorted(options.into.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        if name in versions and versions[name].contains(version, prereleases=True) and name not in kept:
            kept[name] = wheel.stat().st_size
        else:
            wheel.unlink()  # of another lock: two versions stop the installation
    missing = sorted(set(packages) - set(kept))
    if missing:
        print(f"no wheel came of {', '.join(missing)}")
        return 1
    for name in sorted(kept, key=lambda name: -kept[name])[:6]:
        print(f"{kept[name] / 2**20:8.1f} MiB  {name}")
    print(f"{sum(kept.values()) / 2**20:8.1f} MiB  {len(kept)} wheels in {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
