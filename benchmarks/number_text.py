"""Instructions per number, ours beside C++17's <charconv>: reading and printing JSON arrays of doubles.

    python -m benchmarks.number_text

The server has code of its own for numbers as text (cext/codec/number_text.pyx). That is worth its lines
only while the standard library does not do as well, which this counts: the same 100,000 numbers, the same
shortest digits, under callgrind. Needs valgrind and a C++17 compiler.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.instructions import marks

COUNT = 100_000
PROGRAM = r"""
#include <charconv>
#include <cstdio>
#include <string>
#include <vector>
#include <valgrind/callgrind.h>
int main(int, char** argv) {
    std::string text;
    std::FILE* file = std::fopen(argv[1], "rb");
    for (int c; (c = std::fgetc(file)) != EOF;) text.push_back((char)c);
    std::vector<double> numbers;
    numbers.reserve(200000);
    const char *p = text.data() + 1, *end = text.data() + text.size();
    CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS;
    for (;;) {
        double value;
        auto read = std::from_chars(p, end, value);
        numbers.push_back(value);
        p = read.ptr;
        if (*p++ == ']') break;
    }
    CALLGRIND_DUMP_STATS; CALLGRIND_ZERO_STATS;
    std::vector<char> out(numbers.size() * 26);
    char* q = out.data();
    for (double value : numbers) { q = std::to_chars(q, q + 25, value).ptr; *q++ = ','; }
    CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION;
    return q == out.data();
}
"""


def numbers(kind: str) -> str:
    """A JSON array of that kind of doubles."""
    made = random.Random(1)
    makers = {
        "17 digits": lambda: repr(made.random() * 2 - 1),
        "3 decimals": lambda: repr(round(made.uniform(-100, 100), 3)),
        "whole": lambda: str(made.randint(0, 1000)),
    }
    return f"[{','.join(makers[kind]() for _ in range(COUNT))}]"


def ours(path: Path, library: Path) -> None:
    """Runs under callgrind: reads and prints the file, counted apart."""
    from neptrio.codec.json_tensor import tensor_json, tensor_of
    from neptrio.request.infer_request import DataType

    counting = ctypes.CDLL(str(library))
    text = path.read_bytes()

    def read() -> object:
        return tensor_of("numbers", int(DataType.DT_FP64), (COUNT,), text)

    read()  # warm
    counting.begin()
    tensor = read()
    counting.end()
    counting.begin()
    tensor_json(tensor)
    counting.end()


def counted(folder: Path, *command: str | Path) -> tuple[float, float]:
    """Instructions per number, of reading and of printing."""
    out = folder / "counted"
    for old in folder.glob("counted*"):
        old.unlink()
    subprocess.run(
        ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", *command],
        check=True,
        capture_output=True,
    )
    totals = [
        int(re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.M)[1])
        for dump in sorted(folder.glob("counted.*"))
    ]
    read, printed = (total / COUNT for total in totals if total)
    return read, printed


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "ours":
        ours(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: expected it on PATH (Debian's package valgrind)")
        return 2
    print("| doubles | read: ours | <charconv> | print: ours | <charconv> |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, program, text = folder / "charconv.cpp", folder / "charconv", folder / "numbers.json"
        source.write_text(PROGRAM)
        subprocess.run(["c++", "-std=c++17", "-O3", "-o", program, source], check=True)
        for kind in ("17 digits", "3 decimals", "whole"):
            text.write_text(numbers(kind))
            own = counted(folder, sys.executable, "-m", "benchmarks.number_text", "ours", text, marks())
            standard = counted(folder, program, text)
            print(f"| {kind} | {own[0]:.0f} | {standard[0]:.0f} | {own[1]:.0f} | {standard[1]:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
