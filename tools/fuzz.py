"""Fuzzes the readers of tests/fuzz/targets.py, guided by the coverage of the compiled modules.

    python tools/fuzz.py [--seconds N] [--seed N] [--jobs N] [--keep] [TARGET ...]

libFuzzer (from the package atheris) changes inputs and keeps those that reach new branches; the modules are those of
tools/sanitized.py, so reading outside of a block ends a run as surely as a wrong answer does. A run begins with the
corpus in tests/fuzz/corpus and with what earlier runs found (build/fuzz/corpus). An input that fails a target
is written to build/fuzz/crashes; it belongs, named after what it shows, into tests/fuzz/corpus, where
tests/fuzz/test_corpus.py tries it in every `make test`. `--keep` writes the smallest set of inputs with
the same coverage back into tests/fuzz/corpus.

Where atheris has no wheel or the compiler no sanitizers, nothing is run: the reason is printed, the status is 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import sanitized  # noqa: E402

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PLACE = ROOT / "build" / "fuzz"
NAMES = sorted(path.name for path in CORPUS.iterdir())
LONGEST = 2048  # bytes of an input
KEPT_BYTES = 100_000  # of one target's corpus in the repository


def runtime() -> tuple[Path | None, str]:
    """The sanitizer that comes with libFuzzer, or None and the reason."""
    if find_spec("atheris") is None:
        return None, "the package atheris is not installed (it has wheels for Linux on x86-64)"
    import atheris

    library = Path(atheris.path()) / "asan_with_fuzzer.so"
    if not library.exists():
        return None, f"atheris has no {library.name}"
    _, reason = sanitized.runtime()
    return (None, reason) if reason else (library, "")


def environment(library: Path) -> dict[str, str]:
    given = sanitized.environment(sanitized.PLACE, [library], PLACE)
    given["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32"
    given["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
    return given


def command(target: str, *words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", target, *words]


def fuzz(target: str, seconds: int, seed: int, library: Path) -> tuple[str, bool, str]:
    """(target, whether it is fine, the last lines that libFuzzer wrote)."""
    own = PLACE / "corpus" / target
    crashes = PLACE / "crashes"
    own.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    log = PLACE / f"{target}.log"
    with log.open("wb") as out:
        status = subprocess.run(
            command(
                target, str(own), str(CORPUS / target),
                f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST}", "-timeout=30", "-rss_limit_mb=4096",
                f"-artifact_prefix={crashes}/{target}-", "-use_value_profile=1", "-print_final_stats=1",
            ),
            cwd=ROOT, env=environment(library), stdout=out, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    text = log.read_text(errors="replace")
    if status == 0:
        stats = [
            line.rpartition(":")[2].strip()
            for line in text.splitlines()
            if "number_of_executed_units" in line
        ]
        found = [line for line in text.splitlines() if " ft: " in line][-1:]
        return target, True, f"{stats[0] if stats else '?'} inputs; {found[0] if found else ''}"
    return target, False, text[-8000:]


def keep(target: str, library: Path) -> str:
    """Writes the smallest corpus with the same coverage into the repository, as far as it may be large."""
    merged = PLACE / "merged" / target
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    named = [path for path in (CORPUS / target).iterdir() if len(path.name) != 16]
    subprocess.run(
        command(target, "-merge=1", str(merged), str(CORPUS / target), str(PLACE / "corpus" / target)),
        cwd=ROOT, env=environment(library), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    for path in (CORPUS / target).iterdir():
        if path not in named:
            path.unlink()
    room = KEPT_BYTES
    for path in sorted(merged.iterdir(), key=lambda path: path.stat().st_size):
        data = path.read_bytes()
        room -= len(data)
        if room < 0:
            break
        if not any(other.read_bytes() == data for other in named):
            (CORPUS / target / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return f"{target}: {len(list((CORPUS / target).iterdir()))} inputs kept"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of what strangers may send.")
    parser.add_argument("--seconds", type=int, default=600, help="of each target (default 600)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of what is tried, so that CI tries the same twice (default: of the time)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="write what was found into tests/fuzz/corpus")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)} (default: all)")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(NAMES):
        parser.error(f"unknown target {', '.join(sorted(unknown))}, expected one of {', '.join(NAMES)}")
    library, reason = runtime()
    if library is None:
        print(f"fuzz: NOT RUN, {reason}")
        return 0
    sanitized.build()
    targets = given.targets or NAMES
    begun = time.monotonic()
    failed = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for target, fine, text in pool.map(
            lambda name: fuzz(name, given.seconds, given.seed, library), targets
        ):
            if fine:
                print(f"fuzz: {target}: {text}", flush=True)
            else:
                failed.append(target)
                print("=" * 100, f"fuzz: {target} FAILED", text, sep="\n", flush=True)
        if given.keep:
            for line in pool.map(lambda name: keep(name, library), targets):
                print(f"fuzz: {line}")
    print(
        f"fuzz: {len(targets)} targets in {time.monotonic() - begun:.0f} s, failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
