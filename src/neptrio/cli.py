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
            print(f"error: {_no_folder(argv[0])}", file=sys.stderr)
            return 2
        argv = [f"--model-repository={argv[0]}", *argv[1:]]
    first = f"{EXAMPLES}\n\n{commands.summary()}" if {"--help", "-h"} & set(argv) else ""
    return serve(*settings_of(argv, first=first))


def _no_folder(word: str) -> str:
    """What is wrong with a first argument that is neither a subcommand nor a folder, and what was probably meant."""
    if not Path(word).is_file():
        return f"'{word}' is neither a subcommand nor a folder of models{flags.nearest(word, commands.names(), 0.6)}"
    meant = (
        f"serve {word}:server' serves its functions"
        if word.endswith(".py")
        else f"import {word}' makes one of it"
    )
    return f"'{word}' is a file and not a folder of models: 'neptrio {meant}"


if __name__ == "__main__":
    sys.exit(main())
