"""Runs tests with the oldest and the newest packages and Pythons that the project supports.

    python tools/test_versions.py [NAME ...] [--tests PATH ...]

The ordinary environment has the newest packages on one Python. What reaches furthest into other people's
internals (the poller replaces trio's, the REST port runs inside hypercorn) can break on either side of that:

    oldest  Python 3.11 with the lower bounds of trio, hypercorn and numpy that pyproject.toml gives
    middle  Python 3.12 with the packages of requirements/
    newer   Python 3.13 with the packages of requirements/
    newest  Python 3.14 with the packages of requirements/

`make lock` makes those of requirements/ the newest ones: what a release of today changes is found when they are
renewed, and nothing that somebody publishes changes what this says of a commit. With LOCK=no in the environment,
pip chooses the newest ones of the day.

Each has an environment in build/versions, kept between runs, and uses this checkout's sources. Modules are compiled
once per Python, beside those that are there: not at all for the Python that runs this, which `make build` has compiled
them for, and from the same C for the others, because they get the same Cython. Those for CUDA, half of the work, are left
out. A Python that this machine does not have is named and left out; with none found the exit status is 1.

The question here is whether a version fits, and what does not fit fails every time. So a few failures are tried
once more, alone, and those that pass are named in the last lines: they depend on time, and `make test`, which runs
the same tests and tries nothing twice, is where that is found and repaired.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
NAMES = {"oldest": "3.11", "middle": "3.12", "newer": "3.13", "newest": "3.14"}
PINNED = ("trio", "hypercorn", "numpy")
FEW = 3  # that are tried again; more than that is no accident
XDIST = ("-n", "2", "--dist", "loadfile", "--max-worker-restart=0")  # a worker that dies ends the run
# what meets trio, hypercorn, h2, numpy and the interpreter
TESTS = (
    "tests/backends/python/test_execute.py",
    "tests/client",
    "tests/codec",
    "tests/loop",
    "tests/request",
    "tests/test_server.py",
    "tests/transport",
)
# what the server decides in its own words, on any version alike: half of those tests (`--tests` runs them, too)
LEFT_OUT = (
    *(f"tests/client/test_ensemble_{what}.py" for what in ("branches", "parts", "steps")),
    "tests/client/test_asked_traces.py",
    "tests/client/test_opentelemetry.py",
    "tests/client/test_queue_policies.py",
    "tests/client/test_rate_limiting.py",
    "tests/client/test_response_cache.py",
    "tests/client/test_tracing.py",
    "tests/transport/rest/test_generate_models.py",
    "tests/transport/rest/test_hostile_text.py",
    "tests/transport/rest/test_http_errors.py",
    "tests/transport/rest/test_openai.py",
    "tests/transport/test_admin.py",
    "tests/transport/test_audit.py",
    "tests/transport/test_console.py",
    "tests/transport/test_control_sizes.py",
    "tests/transport/test_header_policy.py",
    "tests/transport/test_impossible_shapes.py",
    "tests/transport/test_large_controls.py",
    "tests/transport/test_metrics.py",
    "tests/transport/test_operators.py",
    "tests/transport/test_origin_policy.py",
    "tests/transport/test_owned.py",
    "tests/transport/test_token_limits.py",
    "tests/transport/test_tokens.py",
)
QUICK = ("-m", "not slow")  # a version that does not fit shows in those


def interpreter(version: str) -> str | None:
    """A Python of that version: this one, one on PATH, or one of pyenv's."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    found = shutil.which(f"python{version}")  # pyenv's stand-in for a version that is not chosen fails
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for folder in sorted((pyenv / "versions").glob(f"{version}.*"), reverse=True):
        if (folder / "bin" / "python").exists():
            return str(folder / "bin" / "python")
    return None


def lower_bounds() -> list[str]:
    """`name==bound` of what is pinned in the oldest environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {}
    for requirement in project["dependencies"]:
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)", requirement)
        if found and found[1] in PINNED:
            bounds[found[1]] = found[2]
    missing = set(PINNED) - set(bounds)
    if missing:
        raise SystemExit(f"expected a lower bound (>=) in pyproject.toml of {sorted(missing)}")
    return [f"{name}=={bound}" for name, bound in bounds.items()]


def environment(name: str, python: str) -> Path:
    """The interpreter of an environment with everything that testing needs, and the modules built for it."""
    folder = FOLDER / name
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run([own, ROOT / "tools" / "install.py", "run", "test"], check=True)
    # another Cython than this environment's writes all of the C anew
    wanted = [
        f"Cython=={importlib.metadata.version('Cython')}",
        *(lower_bounds() if name == "oldest" else []),
    ]
    subprocess.run(
        [own, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *wanted], check=True
    )
    site = subprocess.run(
        [own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(site) / "neptrio.pth").write_text(f"{ROOT / 'src'}\n")
    if python == sys.executable:
        return own
    log = folder / "build.log"
    with log.open("wb") as out:
        built = subprocess.run(
            [own, "setup.py", "build_ext", "--inplace"],
            cwd=ROOT,
            env={**os.environ, "NEPTRIO_WITHOUT_CUDA": "1"},
            stdout=out,
            stderr=out,
        )
    if built.returncode:
        raise SystemExit(f"{log.read_text()[-3000:]}\nthe modules could not be built for {name}")
    return own


def outcome_of(own: Path, tests: list[str], place: Path = ROOT) -> str:
    """`passed`, with what was tried twice, or `failed` with pytest's status."""
    with tempfile.TemporaryDirectory() as folder:
        pytest = [str(own), "-m", "pytest", "-o", f"cache_dir={folder}"]
        report, kept = Path(folder) / "report.xml", Path(folder) / "v" / "cache" / "lastfailed"
        status = subprocess.run([*pytest, f"--junitxml={report}", *XDIST, *tests], cwd=place).returncode
        if status == 0:
            return "passed"
        failed = sorted(json.loads(kept.read_text())) if kept.exists() else []
        # a process that died and a file that cannot be imported have nothing to do with time
        died = report.exists() and "crashed while running" in report.read_text()
        if status != 1 or died or not 0 < len(failed) <= FEW or any("::" not in name for name in failed):
            return f"failed ({status})"
        print(f"tried again, alone: {' '.join(failed)}", flush=True)
        status = subprocess.run([*pytest, *failed], cwd=place).returncode
    return f"failed ({status}), twice" if status else f"passed, the second time only: {' '.join(failed)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(NAMES)}; all when none is given")
    usual = [*TESTS, *(f"--ignore={path}" for path in LEFT_OUT), *QUICK]
    parser.add_argument("--tests", nargs="+", default=usual, help="what pytest is given")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"expected names of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    outcomes: dict[str, str] = {}
    for name in options.names or NAMES:
        python = interpreter(NAMES[name])
        if python is None:
            outcomes[name] = f"not run: this machine has no Python {NAMES[name]}"
            continue
        own = environment(name, python)
        versions = subprocess.run(
            [
                own,
                "-c",
                f"import importlib.metadata as m; print(*(p + ' ' + m.version(p) for p in {PINNED}))",
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        print(f"{name}: Python {NAMES[name]}, {versions}", flush=True)
        outcomes[name] = outcome_of(own, options.tests)
    for name, outcome in outcomes.items():
        print(f"{name:<8} {outcome}")
    return int(
        not any(o.startswith("passed") for o in outcomes.values())
        or any(o.startswith("failed") for o in outcomes.values())
    )


if __name__ == "__main__":
    sys.exit(main())
