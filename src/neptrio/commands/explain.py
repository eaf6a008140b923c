"""Say in words what will and won't batch for a model, and why.

The configuration is read from a model repository, or asked from a running server. The server has filled in
what the configuration leaves open, and also tells why it closed its batches so far. With --plot a running server is
measured (neptrio.sweep).
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from neptrio.config import model_config as model_config
from neptrio.errors import InvalidArgument, TritonError
from neptrio.flags import authorization
from neptrio.scheduling.explain import explain
from neptrio.sweep import report

HELP = "say what will and won't batch for a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio explain`."""
    parser.add_argument("model", help="the model's name")
    parser.add_argument(
        "--url", default="localhost:8000", help="the server's HTTP address (default: localhost:8000)"
    )
    parser.add_argument(
        "--model-repository", type=Path, help="read the configuration here instead of asking a server"
    )
    report.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the sentences, or measures. Returns 0, 1 when there is no such model or no such server, 2 for flags that do
    not go together."""
    if options.plot is not None:
        if options.model_repository is not None:
            print("error: --plot measures a running server: leave out --model-repository", file=sys.stderr)
            return 2
        return report.plot(options)
    if given := report.unused(options):
        print(f"error: {given[0]} goes with --plot", file=sys.stderr)
        return 2
    batches: dict[str, Any] = {}
    try:
        if options.model_repository is not None:
            config = _read(options.model_repository, options.model)
        else:
            config, batches = _ask(options.url, options.model)
        lines = explain(config)
    except (TritonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in lines + _so_far(batches):
        print(textwrap.fill(line, 100, subsequent_indent="  "))
    return 0


def _read(repository: Path, name: str) -> Any:
    """The configuration as a server completes it, as far as files tell that. Raises InvalidArgument."""
    from neptrio.repository.check import Checker
    from neptrio.settings import Settings

    if not (repository / name).is_dir():
        raise InvalidArgument(f"there is no model '{name}' in {repository}")
    checked = Checker(Settings(model_repository=(repository,)), here=False).model(name)
    if checked.config is None:
        raise InvalidArgument("\n".join(map(str, checked.problems)))
    if not checked.complete:
        print(
            f"warning: '{name}' may complete its configuration when it is loaded; `neptrio explain {name}` asks a running server",
            file=sys.stderr,
        )
    return checked.config


def _get(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers=authorization())


def _ask(url: str, name: str) -> tuple[Any, dict[str, Any]]:
    base = f"{url if '://' in url else f'http://{url}'}/v2/models/{quote(name, safe='')}"
    try:
        with urllib.request.urlopen(_get(f"{base}/config"), timeout=10) as answer:
            config = model_config.parse_json(answer.read(), f"{base}/config")
        with urllib.request.urlopen(_get(f"{base}/stats?live=true"), timeout=10) as answer:
            stats = json.loads(answer.read())["model_stats"][-1]
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        raise InvalidArgument(
            f"{url} says: {json.loads(text)['error'] if text[:1] == '{' else text}"
        ) from None
    except urllib.error.URLError as error:
        raise InvalidArgument(
            f"no answer from a server at {url}: {error.reason} (--url=HOST:PORT names another, "
            "--model-repository=DIR asks none)"
        ) from None
    return config, stats.get("batches", {})


def _so_far(batches: dict[str, Any]) -> list[str]:
    """How the batches so far were closed, as the server counts them."""
    if not batches:
        return []
    total = sum(row["count"] for row in batches.values())
    parts = []
    for reason, row in sorted(batches.items(), key=lambda item: -item[1]["count"]):
        count = row["count"]
        parts.append(
            f"{reason} {count} ({100 * count / total:.0f} %, mean size {row['size_sum'] / count:.1f}, oldest waited "
            f"{row['oldest_wait_ns'] / count / 1000:.0f} us on average)"
        )
    return [f"So far {total} batch{'es were' if total > 1 else ' was'} closed: {'; '.join(parts)}."]
