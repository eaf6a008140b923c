"""Changes the instance groups of a model while it serves (docs/protocol/rules.md E1.15 and E4.5).

New instances are made, initialized and warmed up while the old ones serve. Then, without an await in between, they
join and those no longer wanted retire: batches finish where they are, live sequences stay with their instance
until they end. Model, scheduler and statistics stay.

Rules:
 1. Before commit() nothing that serves has changed, not even the configuration that clients see.
 2. When any new instance fails, all new ones are finalized and the old ones go on.
 3. stop() undoes whatever start() has done, at any time before commit().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neptrio.config import groups
from neptrio.execution.instance import Instance
from neptrio.observe.memory import Measured
from neptrio.repository.model import Model
from neptrio.repository.warmup import warm_up


class Regrouping:
    """One change of one model, from start() to commit() or stop()."""

    def __init__(self, model: Model, config: Any) -> None:
        self.model = model
        self.config = config  # the new configuration, completed and checked
        self.written: Any = model.written  # what the new configuration was completed from
        self.measured: Measured | None = None
        self._made: list[Instance] = []
        self._retired: list[Instance] = []

    @property
    def load_duration_secs(self) -> float:
        """Seconds that making the new instances took."""
        return self.measured.seconds if self.measured is not None else 0.0

    async def start(self, tell: Callable[[str], None] = lambda phase: None) -> None:
        """Makes the missing instances and waits until they could serve.

        `tell` is called with each phase's name. Raises TritonError; call stop() then, and when cancelled.
        """
        model, pool = self.model, self.model.pool
        missing, self._retired = groups.plan(pool.instances + pool.passive, groups.placements(self.config))
        if not missing:
            return
        names = groups.names(missing, [instance.name for instance in pool.all])
        before = groups.reset(model.config, model.config)
        groups.take_over(model.config, self.config)  # new instances are told the new configuration
        try:
            for place, name in zip(missing, names, strict=True):
                self._made.append(model.make_instance(place, name))
                pool.joining.append(self._made[-1])
        finally:
            groups.take_over(model.config, before)
        for instance, place in zip(self._made, missing, strict=True):
            pool.register(instance, place.group, place.device)
        tell("initializing new instances")
        await model.start_instances(self._made)
        if self.config.model_warmup:
            tell("warming up new instances")
        await warm_up(model, [instance for instance in self._made if not instance.passive])

    def commit(self) -> None:
        """Carries out the change. Nothing in here waits or can fail."""
        made, self._made = self._made, []
        self.model.exchange(self.config, made, self._retired)
        self.model.written = self.written
        if self.measured is not None:
            self.model.remeasured(self.measured)

    def abort(self) -> None:
        """The load was abandoned: initialize() should stop early; stop() follows."""
        for instance in self._made:
            instance.backend.abort()

    async def stop(self) -> None:
        """Finalizes the instances that were made and will not serve (InstancePool.discard)."""
        made, self._made = self._made, []
        await self.model.pool.discard(made)
