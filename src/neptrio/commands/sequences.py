"""Lists the live sequences of a model: which instance holds each, and how long it has been idle; --end ends one.

Asks a running server over HTTP (our sequences extension).
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlencode

from neptrio.addresses import model_in_path
from neptrio.client.client import InferenceError
from neptrio.client.connection import ConnectionLost
from neptrio.client.http import HttpClient

HELP = "list a model's live sequences, or end one"
COLUMNS = ("id", "state", "instance", "slot", "age", "idle", "queued", "executing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio sequences`."""
    parser.add_argument("model", help="the model's name")
    parser.add_argument(
        "--url", default="localhost:8000", help="the server's HTTP address (default: localhost:8000)"
    )
    parser.add_argument("--version", default="", help="the model's version (default: the latest)")
    parser.add_argument("--end", metavar="ID", help="end this sequence; what it has sent already still runs")
    parser.add_argument(
        "--type", choices=("uint", "string"), help="the type of ID (default: uint if it is all digits)"
    )
    parser.add_argument(
        "--token", metavar="NAME", help="whose sequence to end, if several tokens have the ID"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1e6:.3f}s"


def table(answer: dict[str, Any]) -> str:
    """The listing as text."""
    heads: tuple[str, ...] = COLUMNS
    if any("token" in row for row in answer["sequences"]):  # the server asks clients who they are
        heads = ("token", *COLUMNS)
    rows = [
        (
            *([row.get("token") or "-"] if heads is not COLUMNS else []),
            json.dumps(row["id"]),
            row["state"],
            row["instance"] or "-",
            str(row["slot"]) if row["slot"] >= 0 else "-",
            _seconds(row["age_us"]),
            _seconds(row["idle_us"]),
            str(row["queued"]),
            str(row["executing"]),
        )
        for row in answer["sequences"]
    ]
    widths = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heads, *rows]
    ]
    lines.append(
        f"{answer['live']} live, {answer['slots_used']} of {answer['slots']} slots used, "
        f"{answer['backlog']} in the backlog with {answer['backlog_requests']} requests"
    )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Asks the server and prints its answer. Returns 0, or 1 when the server refuses or cannot be reached."""
    path = f"/v2/models/{model_in_path(options.model)}"
    if options.version:
        path += f"/versions/{options.version}"
    path += "/sequences"
    if options.end is not None:
        path += f"/{quote(options.end, safe='')}/end"
        query = {key: value for key, value in (("type", options.type), ("token", options.token)) if value}
        path += f"?{urlencode(query)}" if query else ""
    try:
        with closing(HttpClient(options.url, 30)) as client:
            answer = client.json("GET" if options.end is None else "POST", path)
    except (InferenceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ConnectionLost as error:
        print(f"error: no answer from a server at {error} (--url=HOST:PORT names another)", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    try:
        text = _ended(answer) if options.end is not None else table(answer)
    except (KeyError, TypeError, AttributeError, ValueError):
        print(
            f"error: {options.url} answered without sequences: is this the server's HTTP port?",
            file=sys.stderr,
        )
        return 1
    print(text)
    return 0


def _ended(answer: dict[str, Any]) -> str:
    return f"ended {json.dumps(answer['id'])}, {answer['requests_left']} accepted requests still run"
