"""The `neptrio` command: tritonserver's flags, with their defaults (spec/features.md A8)."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from neptrio import __version__
from neptrio.errors import TritonError
from neptrio.settings import Settings


def _bool(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="neptrio", description="An inference server that speaks the Triton protocol."
    )
    p.add_argument("--version", action="version", version=__version__)
    p.add_argument("--id", default="triton")
    p.add_argument("--model-repository", "--model-store", type=Path, action="append", required=True)
    p.add_argument("--model-control-mode", choices=("none", "explicit"), default="none")
    p.add_argument("--load-model", action="append", default=[])
    p.add_argument("--strict-readiness", type=_bool, default=True)
    p.add_argument("--exit-on-error", type=_bool, default=True)
    p.add_argument("--exit-timeout-secs", type=float, default=30.0)
    p.add_argument("--disable-auto-complete-config", action="store_true")
    p.add_argument("--model-load-thread-count", type=int, default=4)
    p.add_argument("--allow-http", type=_bool, default=True)
    p.add_argument("--http-address", default="0.0.0.0")
    p.add_argument("--http-port", type=int, default=8000)
    p.add_argument("--http-max-input-size", type=int, default=64 << 20)
    p.add_argument("--allow-grpc", type=_bool, default=True)
    p.add_argument("--grpc-address", default="0.0.0.0")
    p.add_argument("--grpc-port", type=int, default=8001)
    p.add_argument("--log-verbose", type=int, default=0)
    return p


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the process's exit status."""
    from neptrio import server

    options = vars(parser().parse_args(argv))
    options["model_repository"] = tuple(options["model_repository"])
    options["load_model"] = tuple(options["load_model"])
    settings = Settings(**options)
    logging.basicConfig(
        level=logging.DEBUG if settings.log_verbose else logging.INFO,
        format="%(levelname).1s %(asctime)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        return server.run(settings)
    except (TritonError, OSError) as error:
        print(f"error: creating server: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
