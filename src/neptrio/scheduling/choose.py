"""Makes the scheduler that a model's configuration asks for."""

from __future__ import annotations

import logging

from neptrio.config import sequence_config
from neptrio.errors import InvalidArgument
from neptrio.execution.instance import InstancePool
from neptrio.scheduling import ensemble_graph
from neptrio.scheduling.base import LoopServices, Scheduler, ServedModel
from neptrio.scheduling.cache_elsewhere import AskingScheduler, CacheElsewhere
from neptrio.scheduling.caching import CachingScheduler
from neptrio.scheduling.default import DefaultScheduler
from neptrio.scheduling.dynamic import DynamicScheduler
from neptrio.scheduling.ensemble import EnsembleScheduler
from neptrio.scheduling.explain import explain
from neptrio.scheduling.policy import batching_policy
from neptrio.scheduling.sequence_direct import DirectScheduler
from neptrio.scheduling.sequence_oldest import OldestScheduler

log = logging.getLogger("neptrio.batcher")


def make_scheduler(model: ServedModel, pool: InstancePool, loop: LoopServices) -> Scheduler:
    """The scheduler for `model`'s scheduling_choice. Raises InvalidArgument."""
    scheduler = _scheduler(model, pool, loop)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("version %s: %s", model.version, " ".join(explain(model.config)))
    cache = loop.cache
    if model.config.response_cache.enable and cache is not None:
        if model.decoupled or model.config.WhichOneof("scheduling_choice") == "sequence_batching":
            kind = "a decoupled model" if model.decoupled else "a sequence model"
            raise InvalidArgument(f"response cache is not available for {kind}: '{model.name}'")
        if isinstance(cache, CacheElsewhere):
            return AskingScheduler(model, scheduler, cache, loop.timers)
        return CachingScheduler(model, scheduler, cache, loop.timers)
    if model.config.response_cache.enable:
        log.warning("response_cache of model '%s' has no effect without --cache-config", model.name)
    return scheduler


def _scheduler(model: ServedModel, pool: InstancePool, loop: LoopServices) -> Scheduler:
    choice = model.config.WhichOneof("scheduling_choice")
    if choice == "ensemble_scheduling":
        return make_ensemble(model, loop)
    if choice == "dynamic_batching":
        return DynamicScheduler(model, pool, loop, batching_policy(model.config))
    if choice == "sequence_batching":
        config = sequence_config.parse(model.config, model.context.model_dir)
        strategy = DirectScheduler if config.direct else OldestScheduler
        return strategy(model, pool, loop, config)
    return DefaultScheduler(pool, loop)


def make_ensemble(model: ServedModel, loop: LoopServices) -> Scheduler:
    """The scheduler of an ensemble; marks the model as decoupled if one of its steps is. Raises InvalidArgument."""
    host = model.context.host
    graph = ensemble_graph.build(model.config, host.admission.lookup)
    model.config.model_transaction_policy.decoupled = graph.decoupled
    model.decoupled = graph.decoupled
    limit = model.config.ensemble_scheduling.max_inflight_requests
    return EnsembleScheduler(graph, host.admission, loop, limit, host.foreign_inputs)
