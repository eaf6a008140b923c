"""Sampling: which requests are traced, under which settings, and where finished traces go.

Rules:
 1. With tracing off everywhere a request costs one attribute test (InferenceService.tracing).
 2. A request that came over the network is counted once in its model's scope, after it was validated;
    ensemble steps and BLS calls are parts of the request they are made for and count nowhere.
 3. A scope that was replaced finishes what it has sampled, then is flushed. A scope whose count is used
    up is flushed to an indexed file when its last trace is finished.
 4. When files cannot be written, tracing stops, with one logged error, until settings are updated.
Everything here runs on the trio thread; files are the writer's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import trio

from neptrio._cext.mailbox import WorkItem
from neptrio._cext.request import InferRequest
from neptrio.observe.trace_file import TraceWriter
from neptrio.observe.trace_record import Group, Trace
from neptrio.observe.trace_settings import TraceTable
from neptrio.stamps import Stamp

log = logging.getLogger("neptrio.trace")
RECV_START = int(Stamp.RECV_START)
RECENT = 128


class _Failed(WorkItem):
    """The writer's bad news, on its way to the trio thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def deliver(self) -> None:
        self._tracer.stop()


class Tracer:
    """Samples requests and hands finished traces to the writer."""

    def __init__(
        self, table: TraceTable, turn: Any, completions: Any, inference: Any, tensor_bytes: int
    ) -> None:
        self.table = table
        self.turn = turn
        self.tensor_bytes = tensor_bytes
        self.writer = TraceWriter(lambda: completions.post(_Failed(self)))
        self.disabled = False
        self._inference = inference
        self._open = 0
        self._recent: deque[Group] = deque(maxlen=RECENT)
        inference.tracer = self
        self._activate()

    def _activate(self) -> None:
        wanted = not self.disabled and any(scope.level and scope.left for scope in self.table.scopes())
        self._inference.tracing = wanted or self._open > 0

    def begin(self, request: InferRequest) -> None:
        """A validated request is about to be queued: traces it if it is its turn."""
        parent = request.parent
        if parent is not None:
            above = parent.trace
            if above is not None and above.group.open:
                request.trace = Trace(above.group, request, above.id)
        elif request.timestamp(RECV_START) and not self.disabled:
            scope = self.table.scope(request.model.name)
            if scope.sample():
                self._open += 1
                request.trace = Trace(Group(self, scope), request, 0)

    def finished(self, group: Group) -> None:
        """Every part of a trace has ended."""
        scope = group.scope
        self._open -= 1
        scope.open -= 1
        self._recent.append(group)
        self.writer.put(scope, group.parts)
        if not scope.open:
            if scope.retired:
                self.writer.flush(scope, scope.left == 0)
            elif not scope.left:
                self.writer.flush(scope, True)
        if not self._open:
            self._activate()

    async def update(self, changes: Mapping[str, Any], model: str) -> None:
        """Installs changed settings and waits until the old ones' traces are on disk.

        Raises InvalidArgument and changes nothing when they do not fit together.
        """
        for scope in self.table.update(changes, model):
            if not scope.open:
                self.writer.flush(scope, False)
        if "trace_file" in changes:
            self.writer.reset(self.table.scope(model).file)
        self._activate()
        await trio.to_thread.run_sync(self.writer.settle)
        self.disabled = False  # what the old settings' files could not take does not stop the new ones
        self._activate()

    def stop(self) -> None:
        """Files cannot be written, unless settings were updated since."""
        self.disabled = self.writer.statistics().failed
        self._activate()

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The objects of the last finished traces, oldest first, without tensors."""
        groups = list(islice(reversed(self._recent), count))
        return [part.document()[0] for group in reversed(groups) for part in group.parts]

    async def close(self) -> None:
        """Writes what is left; nothing is traced any more."""
        self._inference.tracing = False
        for scope in self.table.scopes():
            self.writer.flush(scope, False)
        await trio.to_thread.run_sync(self.writer.close)
