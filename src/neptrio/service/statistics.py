"""The statistics extension (docs/protocol/statistics-extension.md) and our additions to it.

Additions: query parameters of the HTTP form add keys at the end of each $model_stat. They are absent unless
asked for, and clients may ignore them. gRPC's messages have no place for more keys: there the metadata
`neptrio-since-start: true` has the message's own fields hold the sums since the server's start.

    percentiles=50,90,99.9   "percentiles": stage -> {"count", "max", "p50", ...}, nanoseconds
    histograms=true          "histograms": stage -> [[upper bound in ns, count], ...]
    since_start=true         "since_start": what the extension shows, over all loads of the version since the
                             server's start
    live=true                "live": what is queued and executing now; "accounts": requests since the load and
                                 how they ended; "batches": close reason -> sizes and waits; "steps": what each step
                                 of an ensemble took; beside "model_stats"
                                 "loop_lag": passes of the event loop, "cumulative": [[bound in ns, passes], ...]

Beside them stand the errors that requests met last (observe.last_errors), a verb of its own: their texts may quote what other
clients sent, so they are not for everybody who may read statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qsl

from neptrio.errors import InvalidArgument
from neptrio.limits import shown
from neptrio.loop.loop_lag import BOUNDS_NS, LoopLag
from neptrio.observe import demand_families, front_ends
from neptrio.observe.counters import ModelCounters
from neptrio.observe.front_ends import FrontEndRow
from neptrio.observe.live import Live, live
from neptrio.observe.processes import processes
from neptrio.repository.catalog import not_above_zero
from neptrio.repository.manager import RepositoryManager
from neptrio.repository.records import Record

MAX_PERCENTILES = 32


@dataclass(frozen=True)
class Detail:
    """Which additions a client asks for."""

    percentiles: tuple[str, ...] = ()  # as the client spelled them
    histograms: bool = False
    live: bool = False
    since_start: bool = False

    @staticmethod
    def parse(query: str) -> Detail:
        """Reads a query string; unknown parameters are ignored, as Triton does.

        Raises InvalidArgument for a value that is not what the parameter takes.
        """
        found: dict[str, Any] = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key == "percentiles":
                found[key] = _percentiles(value)
            elif key in ("histograms", "live", "since_start"):
                found[key] = _switch(f"query parameter '{key}'", value)
        return Detail(**found)


def since_start_asked(name: str, value: str | None) -> bool:
    """Whether the metadata `name` of a gRPC call asks for what since_start does. Raises InvalidArgument for another value."""
    return value is not None and _switch(f"metadata '{name}'", value)


def _switch(what: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"{what} must be true or false, got '{shown(value)}'")
    return value.lower() in ("true", "1")


def _percentiles(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    if len(wanted) > MAX_PERCENTILES:
        raise InvalidArgument(f"at most {MAX_PERCENTILES} percentiles can be asked for, got {len(wanted)}")
    for one in wanted:
        try:
            good = 0 <= float(one) <= 100
        except ValueError:
            good = False
        if not good:
            raise InvalidArgument(
                "query parameter 'percentiles' must be numbers between 0 and 100 separated by commas, "
                f"got '{one}'"
            )
    return tuple(wanted)


NOTHING = Detail()
NOTHING_LIVE = Live(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Away:
    """A version of a model that is loaded on demand, and is not loaded: what it has counted."""

    name: str
    version: str
    counters: ModelCounters


class StatisticsService:
    """Per-version statistics as plain values."""

    def __init__(self, repository: RepositoryManager, lag: LoopLag) -> None:
        self._repository = repository
        self._lag = lag
        self.front_ends: Callable[[], list[FrontEndRow]] = list  # the rows of --frontends

    def model_statistics(self, name: str, version: str, detail: Detail = NOTHING) -> dict[str, Any]:
        """The $stats_model_response. Raises InvalidArgument for an unknown model or version.

        A malformed version is refused before the model is looked up, also when no model is named.
        """
        stats = {"model_stats": list(self.rows(name, version, detail)), **self.others(detail)}
        totals, rows = self.demand(name, detail)
        return {**stats, "on_demand": {**totals, "models": list(rows)}} if totals else stats

    def rows(self, name: str, version: str, detail: Detail = NOTHING) -> Iterator[dict[str, Any]]:
        """The "model_stats" of model_statistics(), each made when it is asked for: there may be thousands. Raises what
        that raises, at once."""
        return (self._one(model, detail) for model in self._models(name, version))

    def texts(
        self, name: str, version: str, form: str, text: Callable[[dict[str, Any]], bytes]
    ) -> Iterator[bytes]:
        """`text(row)` of each of the rows() without additions. `form` names what `text` makes: a row that has not changed
        since it was last asked for in that form is not made again. Raises what rows() raises, at once."""

        def of(model: Any) -> bytes:
            if isinstance(model, Away):
                return text(self._one(model, NOTHING))
            return bytes(model.counters.text_in(form, lambda: text(self._one(model, NOTHING))))

        return (of(model) for model in self._models(name, version))

    def errors(self, name: str = "", version: str = "") -> Iterator[dict[str, Any]]:
        """What requests met last, of each version since its load, each made when it is asked for; without a name of those that
        met anything. Raises as model_statistics() does, at once."""
        return (
            {
                "name": model.name,
                "version": model.version,
                "errors": [] if model.counters.errors is None else model.counters.errors.rows(),
            }
            for model in self._models(name, version)
            if name or model.counters.errors is not None
        )

    def _models(self, name: str, version: str) -> Iterator[Any]:
        repository = self._repository
        name = repository.own_name(name)
        number = repository.number(name, version) if version else 0
        if number < 0:
            raise not_above_zero(version)
        if not name:
            return itertools.chain(repository.each_ready(), self._away(None))
        models: list[Any] = [*repository.each_ready([name]), *self._away(name)]
        if not models:
            raise InvalidArgument(f"requested model '{shown(name)}' is not available")
        if version:
            models = [m for m in models if int(m.version) == number]
            if not models:
                raise InvalidArgument(f"requested model version is not available for model '{shown(name)}'")
        return iter(models)

    def _away(self, name: str | None) -> Iterator[Away]:
        """The versions of a model that is loaded on demand and is not loaded, or all of those that have been."""
        demand, records = self._repository.demand, self._repository.records
        if demand is None:
            return
        # looking at each of thousands that were never loaded would take long, and without a row nobody can rest
        names = [name] if name is not None else sorted(one for one, record in records.items() if record.kept)
        for one in names:
            known, record = demand.away(one), records.get(one)
            if known is None:
                continue
            kept = {} if record is None else record.kept
            versions = {*kept, *(known.signature.versions if known.signature is not None else ())}
            for version in sorted(kept if name is None else versions):
                yield Away(one, str(version), kept.get(version) or ModelCounters())

    def others(self, detail: Detail) -> dict[str, Any]:
        """What model_statistics() has beside "model_stats"."""
        if not detail.live:
            return {}
        lag = self._lag.statistics()
        rows = front_ends.document(self.front_ends())
        return {
            **({"front_ends": rows} if rows else {}),
            "loop_lag": {
                "count": lag.count,
                "sum_ns": lag.sum_ns,
                "max_ns": lag.max_ns,
                "cumulative": [list(pair) for pair in zip(BOUNDS_NS, lag.cumulative, strict=True)],
            },
        }

    def demand(self, name: str, detail: Detail) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """What the member "on_demand" of model_statistics() has, of models that are loaded on demand, and its "models", each
        made when it is asked for; ({}, nothing) where there is none. Of one model, the totals are those of all: they
        name none."""
        view = self._repository.demand_view
        if not detail.live or view is None or not view.any:
            return {}, iter(())
        own = self._repository.own_name(name) if name else ""
        return view.totals(), map(demand_families.document, view.rows(own))

    def _one(self, model: Any, detail: Detail) -> dict[str, Any]:
        stat = {"name": model.name, "version": model.version, **model.counters.snapshot()}
        if isinstance(model, Away):
            stat["memory_usage"] = []
        if detail.percentiles:
            stat["percentiles"] = {
                stage: {
                    "count": histogram.count,
                    "max": histogram.max,
                    **{f"p{p}": histogram.percentile(float(p)) for p in detail.percentiles},
                }
                for stage, histogram in model.counters.histograms().items()
            }
        if detail.histograms:
            stat["histograms"] = {
                stage: histogram.buckets() for stage, histogram in model.counters.histograms().items()
            }
        if detail.since_start:
            record = self._repository.records.get(model.name) or Record(model.name)
            stat["since_start"] = record.since_start(int(model.version))
        if detail.live:
            away = isinstance(model, Away)
            stat["live"] = asdict(NOTHING_LIVE if away else live(model))
            stat["processes"] = [] if away else [asdict(process) for process in processes(model)]
            stat["steps"] = [] if away else model.scheduler.steps()
            stat["accounts"] = model.counters.accounts()
            stat["batches"] = {
                reason: {
                    "count": closing.count,
                    "size_sum": closing.size_sum,
                    "oldest_wait_ns": closing.oldest_wait_ns,
                    "sizes": {str(size): n for size, n in sorted(closing.sizes.items())},
                }
                for reason, closing in sorted(model.counters.closings.items())
            }
        return stat
