"""Runs the tests that reach compiled code under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tools/sanitized.py [--build] [PYTEST ARGUMENTS]

The package is copied into build/sanitized/lib and its modules are built there, so what `make build` made
stays as it is. The tests then run with that copy first on the path and the sanitizers' library preloaded
into every process that they start: servers, models, templates. Each process writes what the sanitizers
find into a file of its own; any such file fails the run, whatever the tests said.

Without a compiler that brings the sanitizers nothing is run: the reason is printed and the status is 0.
`--build` only builds. What is switched off, and why: docs/memory-safety.md.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "sanitized"
REPORTS = PLACE / "reports"
SECONDS = int(os.environ.get("NEPTRIO_SANITIZED_SECONDS", "900"))
SANITIZE = "-fsanitize=address,undefined"

# what reaches compiled code; what only meets Python (hypercorn, TLS, policies, commands) is left to `make test`
TESTS = [
    "tests/cext",
    "tests/codec",
    "tests/fuzz",
    "tests/rings",
    "tests/request",
    "tests/loop",
    "tests/execution",
    "tests/transport/http1",
    "tests/transport/http2",
    "tests/transport/grpc",
    "tests/transport/rest",
    "tests/transport/test_alike.py",
    "tests/transport/test_impossible_shapes.py",
    "tests/transport/test_shutdown.py",
    "tests/wire/test_contract.py",
    "tests/wire/test_infer_messages.py",
    "tests/wire/test_odd_messages.py",
    "tests/wire/test_unsendable_responses.py",
    "tests/scheduling/test_batch_queue.py",
    "tests/observe/test_array_file.py",
    "tests/observe/test_element_text.py",
    "tests/observe/test_tensor_copy.py",
    "tests/observe/test_counters.py",
    "tests/observe/test_histogram.py",
    "tests/backends/python/test_bursts.py",
    "tests/backends/python/test_rings.py",
    "tests/backends/python/test_ring_words.py",
    "tests/backends/python/test_bls.py",
    "tests/backends/python/test_decoupled.py",
    "tests/backends/python/test_execute.py",
    "tests/backends/compiled",
    "tests/backends/kernel/test_host_compiler.py",
    "tests/backends/onnx/test_batches.py",
    "tests/client/test_large_traced_tensors.py",
    "tests/client/test_shared_memory.py",
    "tests/soak/test_hostile.py",
    "--ignore=tests/transport/grpc/test_tls.py",
    "--ignore=tests/transport/rest/test_http2_attacks.py",
    "--ignore=tests/transport/rest/test_openai.py",
    "--ignore=tests/transport/rest/test_openapi.py",
]


def compiler() -> list[str]:
    return os.environ.get("CC", "cc").split()


def runtime() -> tuple[list[Path], str]:
    """The libraries to preload, or none and the reason."""
    words = compiler()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        made = subprocess.run(
            [*words, "-x", "c", "-", SANITIZE, "-o", str(program)],
            input=b"int main(void) { return 0; }\n",
            capture_output=True,
        )
        if made.returncode != 0:
            return [], f"'{' '.join(words)} {SANITIZE}' cannot build a program"
        if subprocess.run([program], capture_output=True).returncode != 0:
            return [], "a program with the sanitizers does not run here"
    found = []
    # the C++ library comes along because the sanitizer looks for its throw before anybody has loaded it
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        asked = subprocess.run([*words, f"-print-file-name={name}"], capture_output=True, text=True)
        path = Path(asked.stdout.strip())
        if not path.is_absolute():
            return [], f"{words[-1]} brings no {name} that could be preloaded (gcc does, with libasan)"
        found.append(path.resolve())
    return found, ""


def build(place: Path = PLACE) -> None:
    """The package, copied to `place`/lib and compiled there. Raises CalledProcessError."""
    library = place / "lib"
    kept = set()
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and path.suffix not in (".so", ".pyc") and ".egg-info" not in str(path):
            inside = path.relative_to(ROOT / "src")
            kept.add(inside)
            target = library / inside
            if not target.exists() or target.stat().st_mtime != path.stat().st_mtime:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
    modules = {p.relative_to(ROOT / "cext").with_suffix("") for p in (ROOT / "cext").rglob("*.pyx")}
    for path in library.rglob("*"):
        inside = path.relative_to(library)
        if path.suffix == ".so":
            gone = inside.relative_to("neptrio").parent / inside.name.partition(".")[0] not in modules
        else:
            gone = path.is_file() and path.suffix != ".pyc" and inside not in kept
        if gone:
            path.unlink()
    counters, made = place / "counters.o", place / "new.o"
    source = ROOT / "tests" / "fuzz" / "counters.c"
    subprocess.run([*compiler(), "-O2", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    if not counters.exists() or counters.read_bytes() != made.read_bytes():
        made.replace(counters)  # else it stays as old as it is, and so does what is linked with it
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "build_ext"),
            *("--build-lib", str(library), "--build-temp", str(place / "objects")),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "NEPTRIO_CEXT_SANITIZE": str(counters),
            "NEPTRIO_WITHOUT_CUDA": os.environ.get("NEPTRIO_WITHOUT_CUDA", "1"),
        },
        stdout=subprocess.DEVNULL,
        check=True,
    )


def environment(place: Path, libraries: list[Path], reports: Path) -> dict[str, str]:
    """What a process needs to run the modules in `place`."""
    common = f"log_path={reports / 'report'}:print_stacktrace=1"
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(place / "lib"), *([path] if path else [])]),
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": " ".join(str(library) for library in libraries),
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:allocator_may_return_null=1:handle_segv=0:handle_sigbus=0"
        ":quarantine_size_mb=32:malloc_context_size=12:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": common,
        "NEPTRIO_SANITIZED": "1",
    }


def findings(reports: Path) -> list[str]:
    """What the sanitizers wrote, each once, however many processes met it."""
    found: dict[str, str] = {}
    for path in sorted(reports.glob("report.*")):
        text = path.read_text(errors="replace")
        # an undefined behaviour is a line with a stack below it, an error of the other one a whole file
        parts = re.split(r"(?m)^(?=\S+: runtime error: )", text)
        for part in filter(str.strip, parts):
            summary = re.search(r"(?m)^(?:SUMMARY: .*|\S+: runtime error: .*)$", part)
            key = re.sub(r"0x[0-9a-f]+|\b\d{6,}\b", "_", summary[0] if summary else part[:200])
            found.setdefault(key, part)
    return list(found.values())


# reads one byte behind a block, and names a module in use
CONTROL = """
import ctypes, neptrio.codec.json_request as module
print(module.__file__, flush=True)  # the error ends the process
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ctypes.string_at(libc.malloc(8), 9)
"""


def control(libraries: list[Path]) -> str:
    """Why an error would not be found, "" when it would."""
    with tempfile.TemporaryDirectory() as folder:
        given = environment(PLACE, libraries, Path(folder))
        done = subprocess.run([sys.executable, "-c", CONTROL], env=given, capture_output=True, text=True)
        if not done.stdout.startswith(str(PLACE)):
            return f"the modules in use are not those in {PLACE}: {done.stdout}{done.stderr}"
        if not any("heap-buffer-overflow" in text for text in findings(Path(folder))):
            return f"a byte read behind a block was not noticed: {done.stderr}"
    return ""


def main(arguments: list[str]) -> int:
    libraries, reason = runtime()
    if not libraries:
        print(f"sanitizers: NOT RUN, {reason}")
        return 0
    begun = time.monotonic()
    build()
    print(f"sanitizers: built in {time.monotonic() - begun:.0f} s", flush=True)
    if arguments == ["--build"]:
        return 0
    problem = control(libraries)
    if problem:
        print(f"sanitizers: {problem}")
        return 1
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    named = any(word.startswith("tests") for word in arguments)
    chosen = arguments if named else [*TESTS, *arguments]
    tests = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"),
            *("--max-worker-restart=0", *chosen),
        ],
        cwd=ROOT,
        env=environment(PLACE, libraries, REPORTS),
        start_new_session=True,
    )
    try:
        status = tests.wait(max(60.0, SECONDS - (time.monotonic() - begun)))
    except subprocess.TimeoutExpired:
        os.kill(tests.pid, signal.SIGINT)  # it says what has failed so far
        try:
            tests.wait(30)
        except subprocess.TimeoutExpired:
            pass
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        print(f"sanitizers: the tests were not done within {SECONDS} s")
        status = 1
    found = findings(REPORTS)
    for text in found:
        print("=" * 100, text[:6000], sep="\n")
    took = time.monotonic() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"sanitizers: {len(found)} findings, tests ended with status {status}, {took:.0f} s in all "
        f"({used.ru_utime + used.ru_stime:.0f} s of processors)"
    )
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
