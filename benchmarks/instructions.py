"""Instructions per request of the hot paths, by callgrind, against a stored baseline.

Times on a shared machine cannot show a regression of five percent; instruction counts can, on any
machine with the same interpreter. The server of benchmarks/hotpath.py runs under valgrind, and the
counting is on only while a warm connection is fed its requests; what the little client in the same
process does for each answer is in the number, too.

`make bench-instructions` compares with benchmarks/instructions.json and fails when a form needs
more than 3 % more instructions than there; `--save` stores what was counted. The table of steps is
inclusive: what a function and everything below it took, per request.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "benchmarks" / "instructions.json"
TOLERANCE = 0.03
FORMS = ("binary", "json", "unary", "binary+trace", "unary+trace", "engine")
STEPS = {
    "take requests from a front end": r"5rings_7channel_7Channel_\S*drain",
    "answer through a front end": r"8frontend_11engine_side_10EngineSide_respond",
    "HTTP/1.1 head to answer due": r"13Http1FastPath_take_plain",
    "HTTP/2 frames in": r"nghttp2_session_mem_recv",
    "HTTP/2 frames out": r"nghttp2_session_send",
    "decode JSON or binary": r"json_request\S*decode_request",
    "decode protobuf": r"proto_request\S*decode_request",
    "validate": r"8validate_validate",
    "look up, accept, enqueue": r"9admission_9Admission_submit",
    "enqueue": r"12DefaultQueue_queue",
    "dispatch, execute, complete": r"12DefaultQueue_dispatch",
    "complete": r"5batch_complete",
    "encode JSON or binary": r"json_response\S*encode_response",
    "encode protobuf": r"proto_response\S*encode_response",
    "begin a trace": r"13trace_sampler_7Sampler_begin",
    "note an answer": r"5trace_5Trace_answering",
    "note that it was sent": r"5trace_5Trace_sent",
    "finish a trace": r"13trace_sampler_7Sampler_finish",
}
COST = re.compile(r"^\s*([\d,]+) \([^)]*\)\s+(\S.*)$")


def marks() -> Path:
    """Builds the library through which a program switches callgrind's counting on and off."""
    library = ROOT / "build" / "callgrind_marks.so"
    library.parent.mkdir(exist_ok=True)
    source = (
        "#include <valgrind/callgrind.h>\n"
        "void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }\n"
        "void end(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }\n"
    )
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=source,
        text=True,
        check=True,
    )
    return library


def count(form: str, requests: int, folder: Path) -> tuple[float, dict[str, float]]:
    """(instructions per request, step -> instructions per request)."""
    out = folder / f"{form}.out"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": "0"}
    subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-m",
            "benchmarks.hotpath",
            f"--forms={form}",
            f"--count={requests}",
            "--rounds=1",
            f"--marks={marks()}",
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=900,
    )
    costs = read(Path(f"{out}.1"))
    steps = {name: matching(costs, pattern) / requests for name, pattern in STEPS.items()}
    return costs["PROGRAM TOTALS"] / requests, {name: cost for name, cost in steps.items() if cost > 0}


def read(dump: Path) -> dict[str, float]:
    """Function -> inclusive instructions of one dump."""
    text = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(dump)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    costs: dict[str, float] = {}
    for line in text.splitlines():
        found = COST.match(line)
        if found:
            name = found.group(2)
            costs[name] = max(costs.get(name, 0), float(found.group(1).replace(",", "")))
    return costs


def matching(costs: dict[str, float], pattern: str) -> float:
    """The largest inclusive cost among the functions of that name (wrappers contain the function)."""
    return max((cost for name, cost in costs.items() if re.search(pattern, name)), default=0.0)


def main() -> int:
    """Counts, prints, and compares or stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--save", action="store_true", help="make this the baseline")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: expected it on PATH (Debian's package valgrind)")
        return 2
    stored = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"per_request": {}}
    found: dict[str, float] = {}
    steps: dict[str, dict[str, float]] = {}
    worse = False
    with tempfile.TemporaryDirectory() as folder:
        for form in options.forms.split(","):
            found[form], steps[form] = count(form, options.requests, Path(folder))
            before = stored["per_request"].get(form)
            change = f" ({found[form] / before - 1:+.1%} against the baseline)" if before else ""
            print(f"{form}: {found[form]:,.0f} instructions per request{change}", flush=True)
            for name, cost in steps[form].items():
                print(f"    {cost:10,.0f}  {name}")
            worse = worse or bool(before and found[form] > before * (1 + TOLERANCE))
    if options.save:
        text = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "per_request": {form: round(cost) for form, cost in {**stored["per_request"], **found}.items()},
            "steps": {
                form: {name: round(cost) for name, cost in costs.items()}
                for form, costs in {**stored.get("steps", {}), **steps}.items()
            },
        }
        BASELINE.write_text(json.dumps(text, indent=1) + "\n")
    elif stored.get("python") not in (None, platform.python_version()):
        print(f"the baseline was counted with Python {stored['python']}: compare with care")
    return int(worse and not options.save)


if __name__ == "__main__":
    sys.exit(main())
