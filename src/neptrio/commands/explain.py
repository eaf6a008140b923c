"""Say in words what will and won't batch for a model, and why; or plan a budget of memory for models on demand.

The configuration is read from a model repository, or asked from a running server. What it leaves open is filled in, by the
model's own code where it does that; the server also tells why it closed its batches so far. With --plot a running server is
measured. With --memory the traffic of trace files is played against budgets.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from neptrio import flags
from neptrio.addresses import model_in_path
from neptrio.client.client import InferenceError
from neptrio.client.connection import ConnectionLost
from neptrio.client.http import HttpClient
from neptrio.config import model_config as model_config
from neptrio.errors import InvalidArgument, TritonError
from neptrio.execution.backend import LoadContext
from neptrio.execution.model_host import ModelHost
from neptrio.limits import shown
from neptrio.repository import scan
from neptrio.repository.putting_away import size_text
from neptrio.repository.remembered_sizes import Remembered
from neptrio.repository.repositories import Repositories
from neptrio.scheduling.explain import explain
from neptrio.settings import Settings
from neptrio.sweep import report
from neptrio.terminal import counted
from neptrio.traces import memory_plan
from neptrio.traces.reader import NoTraceFile, opened, read

if TYPE_CHECKING:
    from neptrio.repository.check import Checked

HELP = "say what will and won't batch for a model, measure one, or plan a budget of memory"
SHOWN = 10  # models in a plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio explain`."""
    parser.add_argument("model", nargs="?", default="", help="the model's name")
    parser.add_argument(
        "--url", default="localhost:8000", help="the server's HTTP address (default: localhost:8000)"
    )
    parser.add_argument(
        "--model-repository",
        type=flags.local_repository,
        help="read the configuration here instead of asking a server",
    )
    parser.add_argument(
        "--memory", nargs="+", metavar="FILE",
        help="in place of a model: trace files, for which budgets of memory are compared (--model-repository is needed)",
    )  # fmt: skip
    parser.add_argument(
        "--model-cache-directory", type=Path, help="with --memory: the server's flag of that name"
    )
    report.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the sentences, or measures. Returns 0, 1 when there is no such model or no such server, 2 for flags that do
    not go together."""
    if options.memory is not None:
        if options.model or options.model_repository is None or options.plot is not None:
            print(
                "error: --memory FILE... goes with --model-repository DIR, without a model or --plot",
                file=sys.stderr,
            )
            return 2
        return _memory(options)
    if not options.model:
        print("error: expected the name of a model, or --memory FILE...", file=sys.stderr)
        return 2
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
    """The configuration as a server completes it. Raises TritonError."""
    from neptrio.config import validate_config
    from neptrio.repository.check import Checker

    if not (repository / name).is_dir():
        raise InvalidArgument(f"there is no model '{name}' in {repository}")
    settings = Settings(model_repository=(repository,))
    checked = Checker(settings, here=False).model(name)
    if checked.config is None:
        raise InvalidArgument("\n".join(map(str, checked.problems)))
    assert checked.source is not None and checked.folder is not None
    config = checked.config if checked.complete else _completed(checked, settings)
    for problem in validate_config.given(checked.source, config, checked.folder):
        raise InvalidArgument(str(problem))
    return config


def _completed(checked: Checked, settings: Settings) -> Any:
    """The configuration of a model that completes it itself, which runs the model's own code for that, as a load does. Raises
    TritonError."""
    from neptrio.backends import registry
    from neptrio.config import defaults

    assert checked.source is not None and checked.folder is not None
    config, version = model_config.new_config(), max(checked.versions)
    config.CopyFrom(checked.source.config)
    place = checked.folder / str(version)
    backend = registry.find_for(config, settings, [place, checked.folder])
    backend.auto_complete(
        LoadContext(checked.name, version, checked.folder, place, config, settings, cast(ModelHost, None))
    )
    defaults.fill(config, backend)
    return config


def _memory(options: argparse.Namespace) -> int:
    """Prints what budgets would have meant. Returns 1 where a file or the repository cannot be read."""
    uses = memory_plan.Uses()

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    try:
        for file in options.memory:
            with opened(file) as source:
                read(source, uses.add, warn)
        settings = Settings(
            model_repository=(options.model_repository,), model_cache_directory=options.model_cache_directory
        )
        counts = uses.counts()
        sizes = _sizes(settings, counts)
    except (TritonError, OSError, NoTraceFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    gone = counts.keys() - sizes.keys()
    if gone:
        warn(
            f"{counted(len(gone), 'model')} of the traces left out, not in the repository: {', '.join(sorted(gone)[:SHOWN])}"
        )
    order = [name for name in uses.in_order() if name in sizes]
    if not order:
        print("error: no request for a model of the repository is in the traces", file=sys.stderr)
        return 1
    for line in _plan(order, sizes, uses.seconds):
        print(line)
    return 0


def _sizes(settings: Settings, names: Iterable[str]) -> dict[str, memory_plan.Size]:
    """What is known of each model that the repository has. Raises OSError and InvalidArgument."""
    repositories = Repositories(settings)
    try:
        remembered = Remembered(repositories.sizes_file(settings)).read()
        found: dict[str, memory_plan.Size] = {}
        for name in names:
            folders = repositories.folders(name)
            if not folders:
                continue
            known = remembered.get(name)
            if known is not None:
                found[name] = memory_plan.Size(known.held, known.seconds)
                continue
            files = sum(size for _, size in scan.fingerprint(folders[0]).values() if size > 0)
            found[name] = memory_plan.Size(files, measured=False)
        return found
    finally:
        repositories.close()


def _plan(order: list[str], sizes: dict[str, memory_plan.Size], seconds: float) -> Iterator[str]:
    """The lines of the plan."""
    counts = Counter(order)
    found = memory_plan.outcomes(order, sizes)
    best = memory_plan.enough(found, len(order))
    hours = max(seconds / 3600, 1e-9)
    guessed = sum(not sizes[name].measured for name in counts)
    yield f"{len(order):,} uses of {len(counts):,} models in {seconds:,.0f} s."
    if guessed:
        yield (
            f"{guessed:,} of them were never measured, and count as their files. A server with --model-memory-budget writes down "
            "what it has loaded."
        )
    yield ""
    yield f"{'budget':>10}  {'waited for a load':>17}  {'of these spared by more':>23}  {'loads/hour':>10}  {'of their time, s':>16}"
    for one in found:
        waited = sum(one.waits.values())
        yield (
            f"{size_text(one.budget):>10}  {waited:>9,} {waited / len(order):>6.1%}  {one.again:>23,}  {waited / hours:>10,.0f}  "
            f"{one.seconds:>16,.1f}{'  <- enough' if one is best else ''}"
        )
    yield ""
    yield f"{'model':<40}  {'holds':>10}  {'uses':>10}  {'waited':>10}"
    for name, waited in best.waits.most_common(SHOWN):
        mark = "" if sizes[name].measured else " (files)"
        yield f"{shown(name, 40):<40}  {size_text(sizes[name].held):>10}  {counts[name]:>10,}  {waited:>10,}{mark}"
    yield ""
    yield f"--model-memory-budget={-(-best.budget // (1 << 20))}MiB is enough for this traffic; leave a tenth for what overlaps."


def _ask(url: str, name: str) -> tuple[Any, dict[str, Any]]:
    """The configuration of a server's model, and how its batches were closed. Raises InvalidArgument."""
    path = f"/v2/models/{model_in_path(name)}"
    try:
        with closing(HttpClient(url, 10)) as client:
            config = model_config.parse_json(client.call("GET", f"{path}/config")[0], f"{url}{path}/config")
            batches = client.json("GET", f"{path}/stats?live=true")["model_stats"][-1].get("batches", {})
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    except InferenceError as error:
        raise InvalidArgument(f"{url} says: {error}") from None
    except ConnectionLost as error:
        raise InvalidArgument(
            f"no answer from a server at {error} (--url=HOST:PORT names another, --model-repository=DIR asks none)"
        ) from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise InvalidArgument(f"{url} answered without statistics: is this the server's HTTP port?") from None
    return config, batches


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
