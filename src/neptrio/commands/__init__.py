"""Subcommands of `neptrio`: one module each, named after the command.

A module NAME.py (a `_` in it is a `-` on the command line) has:

    HELP: str                                              one line for `neptrio --help`
    def add_arguments(parser: argparse.ArgumentParser)     declares its flags
    def run(options: argparse.Namespace) -> int            does it, returns the exit status
    SERVES = True                                          optional: it serves; flags that it does not declare are
                                                           options.flags, those of `neptrio`

What a command prints passes neptrio.terminal, so that text of others is safe to print.

Without a subcommand `neptrio` serves. Modules are found by their file, so that adding one is
adding a file, and imported only when they are asked for (or listed by `--help`).
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import signal
import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType

from neptrio import process_start, terminal

# the exit status that a shell reports for a program whose output is read no further
ENOUGH = 128 + signal.SIGPIPE


def names() -> list[str]:
    """The subcommands there are, sorted."""
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The module of a subcommand that names() lists."""
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def run(name: str, argv: list[str]) -> int:
    """Parses `argv` for that subcommand and runs it; returns the process's exit status."""
    module = load(name)
    process_start.take_signals_as_usual()
    parser = argparse.ArgumentParser(
        prog=f"neptrio {name}", description=module.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    module.add_arguments(parser)
    options: argparse.Namespace
    serves = getattr(module, "SERVES", False)
    if serves:
        options, options.flags = parser.parse_known_args(argv)
    else:
        options = parser.parse_args(argv)
    try:
        # what serves has a log, whose lines are safe already, and leaves its streams to what it starts
        with nullcontext() if serves else terminal.guarded():
            status = int(module.run(options) or 0)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough, as in `neptrio trace | head`
        _write_no_more()
        return ENOUGH
    except OSError as error:  # what a command reads it answers for itself, so this is its output
        _write_no_more()
        print(f"error: {terminal.shown(str(error))}", file=sys.stderr)
        return 1
    return status


def _write_no_more() -> None:
    """Lets what is not written go, or the flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary() -> str:
    """The lines of `neptrio --help` on subcommands, "" when there are none."""
    lines = [f"  {name:<12}{load(name).HELP}" for name in names()]
    return "subcommands (neptrio NAME --help):\n" + "\n".join(lines) if lines else ""
