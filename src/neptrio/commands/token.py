"""Make a token for clients of a server with --auth-config (docs/security.md).

Prints the token, which is shown this once and kept nowhere, to standard output, and to standard error the lines for
the file, which hold its hash only.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from neptrio.service.auth_config import LIMITS, SCOPES, parse
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
    parser.add_argument("--requests-per-second", type=int, default=0, metavar="N", help="0 = no limit")
    parser.add_argument("--concurrent-requests", type=int, default=0, metavar="N", help="0 = no limit")
    parser.add_argument(
        "--format",
        choices=("toml", "yaml"),
        default="toml",
        help="of the lines; those of yaml are an item of the file's list `token`",
    )


def lines(values: dict[str, Any], form: str) -> str:
    """The entry for the file. Texts and lists of JSON are the same in TOML and YAML."""
    texts = [(key, json.dumps(value, ensure_ascii=False)) for key, value in values.items()]
    if form == "toml":
        return "\n".join(["[[token]]", *(f"{key} = {text}" for key, text in texts)])
    return "\n".join(f"{'  ' if i else '- '}{key}: {text}" for i, (key, text) in enumerate(texts))


def run(options: argparse.Namespace) -> int:
    """Prints a token and the lines for the file; 2 for a name or a limit that cannot be one."""
    token, kept = make()
    values: dict[str, Any] = {"name": options.name, "hash": kept, "scopes": options.scope or ["infer"]}
    if options.model:
        values["models"] = options.model
    for key in LIMITS:
        if getattr(options, key):
            values[key] = getattr(options, key)
    text = lines(values, options.format)
    try:
        parse(text if options.format == "toml" else f"token:\n{text}", options.format == "yaml")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, file=sys.stderr)
    print(token)
    return 0
