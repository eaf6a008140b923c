"""The trace extension: settings can be read and changed while the server runs, for all or one model.

Source: docs/protocol/trace-extension.md, docs/protocol/observed.md 11; decisions of docs/protocol/README.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from neptrio.errors import InvalidArgument, TritonError
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.observe.trace_file import TraceWriterStatistics
from neptrio.observe.trace_options import DIRECTORY, directory, make_directory
from neptrio.observe.trace_settings import NO_TENSORS, check_file, parse_changes, reply
from neptrio.observe.tracer import RECENT, Tracer
from neptrio.repository.manager import RepositoryManager
from neptrio.settings import Settings

log = logging.getLogger("neptrio.trace")


class TraceService:
    """GET and POST v2[/models/M]/trace/setting, and TraceSetting."""

    def __init__(self, settings: Settings, repository: RepositoryManager, tracer: Tracer) -> None:
        self._repository = repository
        self._tracer = tracer
        self._settings = settings
        self._allow_file = settings.allow_trace_file_update
        if settings.trace_dir != DIRECTORY:
            make_directory(settings.trace_dir)
        self._folder = directory(settings.trace_options())  # clients may name files in it
        self._tell_of_tensors(tracer.table.globals.level)

    def settings(self, model: str = "") -> dict[str, Any]:
        """The settings, in the order of the protocol's keys. Raises InvalidArgument for an unknown model."""
        model = self._known(model)
        return reply(self._tracer.table.scope(model), self._tracer.options)

    async def update(
        self, given: Mapping[str, Any], model: str = "", protocol: str = "http"
    ) -> dict[str, Any]:
        """Applies all changes or none; returns the settings. Raises InvalidArgument, Unsupported, Denied.

        When it returns, everything that was traced under the old settings is on disk.
        """
        if given:
            self._settings.change("changing trace settings")
        if "trace_file" in given and not self._allow_file:
            check_file("", "", False)
        model = self._known(model)
        changes = parse_changes(given, protocol, self._tracer.table.mode)
        file = changes.get("trace_file")
        if file is not None:
            # a look at the folder takes as long as its disk does
            await threads.run(self._prepare, file, abandon_on_cancel=True, limiter=self._tracer.disk)
            changes["trace_file"] = os.path.join(self._folder, file)
        if changes:
            await self._tracer.update(changes, model)
            self._tell_of_tensors(changes.get("trace_level"))
        return self.settings(model)

    def _prepare(self, file: str) -> None:
        check_file(file, self._folder, True)
        make_directory(self._folder)

    def recent(self, query: str = "") -> Iterator[bytes]:
        """The trace objects of the requests that finished last, oldest first (our extension): the JSON of a trace at a
        time.

        `query` is the URL's query string; `count=N` limits the answer to N traces. Raises InvalidArgument.
        """
        count = RECENT
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key != "count":
                raise InvalidArgument(f"trace/recent: unknown parameter '{shown(key)}', expected count")
            if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
                raise InvalidArgument(f"trace/recent: count must be a number from 1 on, got '{shown(value)}'")
            count = int(value)
        return self._tracer.last(count)

    def statistics(self) -> TraceWriterStatistics:
        """Counts of traces written and dropped so far."""
        return self._tracer.writer.statistics()

    def _tell_of_tensors(self, levels: tuple[str, ...] | None) -> None:
        if self._tracer.spans and levels and "TENSORS" in levels:
            log.warning(NO_TENSORS)

    def _known(self, model: str) -> str:
        """The model's own name, "" for all models. Raises InvalidArgument for one that neither serves nor will when it is asked
        for."""
        if not model:
            return ""
        demand = self._repository.demand
        known = None if demand is None else demand.away(model)
        if known is not None:
            return known.name
        try:
            return self._repository.lookup(model).name
        except TritonError:
            raise InvalidArgument(f"Request for unknown model : {shown(model)}") from None
