"""Look at trace files: where requests spent their time, and what their tensors were.

Reads files of this server and of Triton servers, also files that are larger than memory or cut off.
Exit status: 0, or 1 when a file cannot be read or written or is no trace file; replay has its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import IO, Any

from neptrio import flags
from neptrio.traces.export import perfetto
from neptrio.traces.reader import NoTraceFile, Trace, opened, read
from neptrio.traces.summary import Summary, trace_lines
from neptrio.traces.view import LIMIT, collect, html

HELP = "summarise, show and export trace files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio trace`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = commands.add_parser(
        "summary", help="averages by stage, percentiles, slowest requests, data flow"
    )
    summary.add_argument("files", nargs="+", metavar="FILE")
    summary.add_argument(
        "-t", action="store_true", dest="traces", help="every trace with the time between points"
    )
    view = commands.add_parser("view", help="write an HTML page with a waterfall of every request")
    view.add_argument("files", nargs="+", metavar="FILE")
    view.add_argument(
        "--output", "-o", default="", help="the page (default: the first FILE's name with .html)"
    )
    view.add_argument("--limit", type=flags.positive, default=LIMIT, metavar="N",
                      help="of more requests only the failed and the slowest are shown (default: %(default)s)")  # fmt: skip
    replay = commands.add_parser(
        "replay", help="send the requests of a TENSORS trace again and compare the answers",
        description="Exit status: 0 all answers are as recorded, 1 some are not, 2 it could not be done.",
    )  # fmt: skip
    add = replay.add_argument
    add("files", nargs="+", metavar="FILE")
    add("--url", "-u", default="", help="the server (default: localhost:8000, gRPC: localhost:8001)")
    add("-i", "--protocol", choices=("http", "grpc"), default="http", help="default: %(default)s")
    add(
        "--model",
        "-m",
        action="append",
        default=[],
        metavar="NAME",
        help="these models only; may be repeated",
    )
    add("--model-version", default="", metavar="V",
        help="ask for this version, `recorded` for the recorded one (default: the server's choice)")  # fmt: skip
    add(
        "--rtol", type=flags.tolerance, default=0.0, help="numbers may differ by so much of what was recorded"
    )
    add("--atol", type=flags.tolerance, default=0.0, help="and by so much more (default: not by a bit)")
    add("--concurrency", type=flags.positive, default=1, metavar="N", help="requests at a time (default: 1)")
    add("--report", type=flags.not_negative, default=20, metavar="N",
        help="print so many requests that differ or were left out (default: %(default)s)")  # fmt: skip
    add(
        "--json",
        action="store_true",
        help="print an object per request that is not as recorded, and one summary",
    )
    export = commands.add_parser("export", help="convert for other viewers")
    export.add_argument("--format", choices=("perfetto",), default="perfetto",
                        help="perfetto: trace events for ui.perfetto.dev and chrome://tracing")  # fmt: skip
    export.add_argument("--output", "-o", default="-", help="the file to write (default: standard output)")
    export.add_argument("file", metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Runs the action; 1 when a file cannot be read or written, or is no trace file."""
    if options.action == "replay":
        from neptrio.traces.replay_report import replay

        return replay(options, lambda name, text: _warn(name)(text))
    if options.action == "summary":
        return max(_told(_summary, name, options.traces) for name in options.files)
    return _told(_export if options.action == "export" else _view, options)


def _told(work: Callable[..., None], *arguments: Any) -> int:
    """Calls `work(*arguments)`; returns 0, or 1 after printing the error when it fails."""
    try:
        work(*arguments)
    except BrokenPipeError:
        raise
    except (OSError, NoTraceFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _private(path: str, flags: int) -> int:
    """An opener for open() that makes a new file readable by its owner alone: it may hold requests' tensors."""
    return os.open(path, flags, 0o600)


def _written(path: str, given: Iterable[str]) -> IO[str]:
    """Opens the file that a command writes. Raises OSError, also where it is one of those that the command was given."""
    for name in given:
        if os.path.exists(path) and os.path.samefile(path, name):
            raise shutil.SameFileError(f"--output={path} is the trace file itself: name another")
    return open(path, "w", encoding="utf-8", errors="replace", opener=_private)


def _warn(name: str) -> Callable[[str], None]:
    return lambda text: print(f"warning: {name}: {text}", file=sys.stderr)


def _summary(name: str, traces: bool) -> None:
    summary = Summary()

    def done(trace: Trace) -> None:
        if traces:
            print("\n".join(trace_lines(trace)))
        summary.add(trace)

    with opened(name) as source:
        print(f"File: {name}")
        read(source, done, _warn(name))
    for line in summary.lines():
        print(line)


def _view(options: argparse.Namespace) -> None:
    page = collect(options.files, options.limit, lambda name, text: _warn(name)(text))
    output = options.output or options.files[0] + ".html"
    text = html(page)
    if output == "-":
        print(text, end="")
        return
    with _written(output, options.files) as out:
        out.write(text)
    print(f"{output}: {page.requests - page.left_out} of {page.requests} requests, {len(text) >> 10} KiB")


def _export(options: argparse.Namespace) -> None:
    with opened(options.file) as source, ExitStack() as stack:

        def out() -> IO[str]:
            if options.output == "-":
                return sys.stdout
            return stack.enter_context(_written(options.output, [options.file]))

        perfetto(source, out, _warn(options.file))
