"""Serves the models of a Python program: `neptrio serve app.py:server`, where app.py has `server = neptrio.Server(...)`.

Every flag of `neptrio` can follow, and comes before what the program says. Functions run in processes of their own,
which import the program again (--isolation=none: in the server's). With --reload the server starts again
whenever a Python file below the program's folder changes; requests under way are answered first.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from neptrio.embedded.functions import absolute, server_of
from neptrio.serving import serve, settings_of

HELP = "serve the models of a Python program"
SERVES = True
LOOK_SECONDS = 0.3
IGNORED = {"__pycache__", "node_modules", "site-packages"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio serve`."""
    parser.usage = "neptrio serve [--reload] [--isolation=process|none] MODULE:SERVER [flags of neptrio]"
    parser.add_argument("app", metavar="MODULE:SERVER", help="a module or FILE.py, and its neptrio.Server")
    parser.add_argument("--reload", action="store_true", help="start again when a Python file changes")
    parser.add_argument("--isolation", choices=("process", "none"), default="process",
        help="where functions run: in processes of their own, or in the server's (default: process)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Serves until a signal; 1 when the program cannot be imported or served, 2 for wrong flags."""
    try:
        app = absolute(options.app)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.reload:
        return _reloading(app, [options.app, f"--isolation={options.isolation}", *options.flags])
    try:
        server = server_of(app)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        print(f"error: {options.app} cannot be imported", file=sys.stderr)
        return 1
    with server.command(app, options.isolation == "process") as given:
        return serve(*settings_of(options.flags, given))


def _reloading(app: str, argv: list[str]) -> int:
    """Runs the server in a process of its own, again and again. Returns that of the last one when told to stop."""
    folder = Path(app.partition(":")[0])
    stopped = False
    # signals that the process has not been sent: each is taken out, and so sent, once
    told: deque[int] = deque()
    child: subprocess.Popen[bytes] | None = None

    def pass_on() -> None:
        with suppress(IndexError):  # that there are no more
            while child is not None:
                child.send_signal(told.popleft())

    def stop(number: int, _frame: Any) -> None:
        nonlocal stopped
        stopped = True
        told.append(number)
        pass_on()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped:
        seen = _times(folder)
        # of a group of its own: a terminal's Ctrl-C comes to it once, through stop()
        child = subprocess.Popen([sys.executable, "-m", "neptrio", "serve", *argv], process_group=0)
        pass_on()  # what came while it was started
        ended = False
        while not stopped and _times(folder) == seen:
            if not ended and child.poll() is not None:
                ended = True
                print(
                    "the server starts again when a file changes; Ctrl-C ends this",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(LOOK_SECONDS)
        if not stopped:
            print("a file has changed, the server starts again", file=sys.stderr, flush=True)
            if child.poll() is None:
                child.terminate()
        status = child.wait()
        child = None
    return status


def _times(folder: Path) -> dict[str, int]:
    """When each Python file below a folder was changed."""
    return dict(_python_files(str(folder)))


def _python_files(folder: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in IGNORED and not entry.name.startswith("."):
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:  # it was removed meanwhile
            continue
