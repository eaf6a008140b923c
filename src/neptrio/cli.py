"""The `neptrio` command: it serves (serving.py), or does what a subcommand says (commands)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from neptrio import commands, flags, process_end
from neptrio.serving import serve, settings_of

INTERRUPTED = 128 + signal.SIGINT  # the exit status that a shell reports
EXAMPLES = """\
examples:
  neptrio models                                  serves the folder `models`: 8000 HTTP, 8001 gRPC, 8002 metrics
  neptrio models --http-address=127.0.0.1 --grpc-address=127.0.0.1
                                                  for this machine alone, with the console
  neptrio models --model-control-mode=explicit --load-model='*'
                                                  clients may load and unload models
  neptrio check models                            says what is wrong with the models, without running any
  neptrio demo                                    serves example models with everything switched on"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the process's exit status, but does not return where process_end.is_to_leave()."""
    try:
        status = _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # Ctrl-C before it serves, or in a command: what was typed needs no explanation
        status = INTERRUPTED
    if process_end.is_to_leave():
        process_end.leave(status)
    return status


def _main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        if argv[0] in commands.names():
            return commands.run(argv[0], argv[1:])
        if not (Path(argv[0]).is_dir() or "://" in argv[0]):
            near = flags.nearest(argv[0], commands.names())
            print(f"error: '{argv[0]}' is neither a subcommand nor a folder of models{near}", file=sys.stderr)
            return 2
        argv = [f"--model-repository={argv[0]}", *argv[1:]]
    first = f"{EXAMPLES}\n\n{commands.summary()}" if {"--help", "-h"} & set(argv) else ""
    return serve(*settings_of(argv, first=first))


if __name__ == "__main__":
    sys.exit(main())
