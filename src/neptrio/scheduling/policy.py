"""The dynamic_batching settings of a model's configuration, checked and with defaults.

Source: docs/protocol/features.md A4, docs/protocol/rules.md E2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neptrio.config.validate_config import DELAY
from neptrio.errors import InvalidArgument


@dataclass(frozen=True)
class QueuePolicy:
    """The queue rules of one priority level. 0 means no limit and no timeout."""

    max_size: int = 0
    timeout_us: int = 0
    override: bool = False
    delay: bool = False

    @property
    def exact(self) -> bool:
        """True with a limit or a timeout: they are exact only if requests stay in the queue until they execute."""
        return bool(self.max_size or self.timeout_us)


@dataclass(frozen=True)
class BatchingPolicy:
    """A model's batch sizes and delay, and the rules of its queue. `levels[0]` is priority level 1."""

    max_batch_size: int
    preferred: tuple[int, ...]
    delay_ns: int = 0
    preserve_ordering: bool = False
    levels: tuple[QueuePolicy, ...] = (QueuePolicy(),)
    default_level: int = 1
    shape_tensors: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True when batches may not be prepared in advance: a limit, a deadline or a priority would become inexact."""
        return len(self.levels) > 1 or any(level.exact for level in self.levels)


def _queue_policy(message: Any) -> QueuePolicy:
    return QueuePolicy(
        message.max_queue_size,
        message.default_timeout_microseconds,
        message.allow_timeout_override,
        message.timeout_action == DELAY,
    )


def batching_policy(config: Any) -> BatchingPolicy:
    """The policy in `config.dynamic_batching`, which validate_config has checked. Raises InvalidArgument for too many levels."""
    batching = config.dynamic_batching
    largest = max(config.max_batch_size, 1)
    count = batching.priority_levels
    if count > MOST_LEVELS:
        raise InvalidArgument(f"priority_levels must be at most {MOST_LEVELS} for {config.name}, got {count}")
    usual = _queue_policy(batching.default_queue_policy)
    levels = tuple(
        _queue_policy(batching.priority_queue_policy[level])
        if count and level in batching.priority_queue_policy
        else usual
        for level in range(1, max(count, 1) + 1)
    )
    return BatchingPolicy(
        max_batch_size=largest,
        preferred=tuple(sorted(set(batching.preferred_batch_size))) or (largest,),
        delay_ns=min(batching.max_queue_delay_microseconds, MOST_DELAY_US) * 1000,
        preserve_ordering=batching.preserve_ordering,
        levels=levels,
        default_level=batching.default_priority_level if count else 1,
        shape_tensors=tuple(i.name for i in config.input if i.is_shape_tensor),
    )


MOST_LEVELS = 100_000  # each takes some memory, whether it is used or not
MOST_DELAY_US = 10**15  # 31 years; keeps nanoseconds within 64 bits
