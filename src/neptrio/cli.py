"""The `neptrio` command: it serves (serving.py), or does what a subcommand says (commands)."""

from __future__ import annotations

import sys

from neptrio import commands, flags, process_end
from neptrio.serving import serve, settings_of


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the process's exit status, but does not return where process_end.is_to_leave()."""
    status = _main(sys.argv[1:] if argv is None else argv)
    if process_end.is_to_leave():
        process_end.leave(status)
    return status


def _main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        if argv[0] in commands.names():
            return commands.run(argv[0], argv[1:])
        near = flags.nearest(argv[0], commands.names())
        print(f"error: unknown subcommand '{argv[0]}'{near}", file=sys.stderr)
        return 2
    epilog = commands.summary() if {"--help", "-h"} & set(argv) else ""
    return serve(*settings_of(argv, epilog=epilog))


if __name__ == "__main__":
    sys.exit(main())
