"""Make a token for clients of a server with --auth-config (docs/security.md).

Prints the token, which is shown this once and kept nowhere, to standard output, and to standard error the lines for
the file, which hold its hash only.
"""

from __future__ import annotations

import argparse
import json
import sys

from neptrio.service.auth_config import SCOPES, parse
from neptrio.service.tokens import make

HELP = "make a token for --auth-config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio token`."""
    parser.add_argument("name", help="what the token is called in errors and logs")
    parser.add_argument(
        "--scope",
        action="append",
        choices=SCOPES,
        default=[],
        help="what it may do; may be repeated (default: infer)",
    )
    parser.add_argument(
        "--model", action="append", default=[], help="a model it is for, * and ? match; may be repeated"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a token and the lines for the file; 2 for a name that cannot be one."""
    token, kept = make()
    lines = [
        "[[token]]",
        f"name = {json.dumps(options.name)}",
        f'hash = "{kept}"',
        f"scopes = {json.dumps(options.scope or ['infer'])}",
    ]
    if options.model:
        lines.append(f"models = {json.dumps(options.model)}")
    text = "\n".join(lines)
    try:
        parse(text)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, file=sys.stderr)
    print(token)
    return 0
