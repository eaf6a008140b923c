"""Says in words what will and won't batch for a model: the rules of docs/batching.md with the model's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from neptrio.config.isolation import asks_for_process, isolated, parameter
from neptrio.scheduling.policy import BatchingPolicy, QueuePolicy, batching_policy


def explain(config: Any) -> list[str]:
    """Sentences about `config` (a completed ModelConfig), the most important first.

    Raises InvalidArgument when its dynamic_batching cannot be followed.
    """
    return [*_explain(config), *_where(config)]


def _where(config: Any) -> list[str]:
    """Where instances run that are or may be processes of their own, and why."""
    if config.backend in ("kernel", "onnxruntime"):
        if not asks_for_process(config, {}):
            return []
        return ["Each instance is a process of its own behind shared memory (parameter isolation 'process')."]
    if config.backend != "python":
        return []
    if not isolated(config):
        why = (
            "isolation 'none'"
            if parameter(config, "isolation")
            else "FORCE_CPU_ONLY_INPUT_TENSORS 'no': tensors in GPU memory are seen there only"
        )
        return [f"Its instances are threads of the server's process and share its GIL (parameter {why})."]
    if parameter(config, "EXECUTION_ENV_PATH"):
        return [
            "Each instance is a process of its own, with the interpreter of its EXECUTION_ENV_PATH, behind shared memory."
        ]
    if parameter(config, "isolation"):
        return ["Each instance is a process of its own behind shared memory (parameter isolation 'process')."]
    return [
        "Each instance is a process of its own behind shared memory, the default for Python models "
        "(--backend-config=python,isolation=none changes it)."
    ]


def _explain(config: Any) -> list[str]:
    choice = config.WhichOneof("scheduling_choice")
    name = config.name
    if choice == "ensemble_scheduling":
        return [
            f"'{name}' is an ensemble: its own requests do not batch, each step batches as its model does.",
            *(
                f"Step {i + 1} is model '{s.model_name}'."
                for i, s in enumerate(config.ensemble_scheduling.step)
            ),
        ]
    if choice == "sequence_batching":
        return [*_sequences(config), _instances(config)]
    if choice != "dynamic_batching":
        return [
            f"Nothing batches: '{name}' has no dynamic_batching, so every request is executed alone.",
            "Remedy: add `dynamic_batching { }` to its configuration"
            + (" and a max_batch_size above 1." if config.max_batch_size <= 1 else "."),
            _instances(config),
        ]
    policy = batching_policy(config)
    if policy.max_batch_size == 1:
        lines = [
            f"Nothing batches: max_batch_size of '{name}' is {config.max_batch_size}, so a batch holds one request. "
            "The queue policies apply all the same."
        ]
    else:
        lines = [
            f"Requests to '{name}' batch up to a sum of {policy.max_batch_size} (max_batch_size); a request is never "
            "split.",
            *_tensors(config),
            *_when(policy),
        ]
    return [*lines, *_queues(policy), _ahead(policy), _instances(config), *_order(policy)]


def _sequences(config: Any) -> list[str]:
    batching = config.sequence_batching
    direct = batching.WhichOneof("strategy_choice") != "oldest"
    slots = max(1, config.max_batch_size)
    if not direct and batching.oldest.max_candidate_sequences > 0:
        slots = batching.oldest.max_candidate_sequences
    if config.max_batch_size <= 1:
        lines = [
            f"Nothing batches: max_batch_size of '{config.name}' is {config.max_batch_size}, so every request of a "
            "sequence is executed alone, those of one sequence one after the other."
        ]
    else:
        lines = [
            f"'{config.name}' batches requests of different sequences (strategy {'direct' if direct else 'oldest'}), "
            f"up to {config.max_batch_size} (max_batch_size); requests of one sequence run one after the other and "
            "never share a batch.",
        ]
    lines.append(
        f"An instance has {slots} slot(s); a sequence keeps one from its START to its END, or until it was idle for "
        f"{batching.max_sequence_idle_microseconds} us (max_sequence_idle_microseconds). Further sequences wait for "
        "a slot, the oldest first."
    )
    if config.max_batch_size <= 1:
        return lines
    if direct:
        lines.append(
            "A slot below another that has a request is filled with an empty one (READY is 0) when it has none."
        )
        if batching.direct.max_queue_delay_microseconds and batching.direct.minimum_slot_utilization:
            lines.append(
                f"A batch goes when {100 * batching.direct.minimum_slot_utilization:.0f} % of the slots have a request "
                "(minimum_slot_utilization), or its oldest request has waited "
                f"{batching.direct.max_queue_delay_microseconds} us (max_queue_delay_microseconds)."
            )
        else:
            lines.append("There is no delay: an idle instance takes what its slots have.")
        return lines
    preferred = tuple(batching.oldest.preferred_batch_size) or (config.max_batch_size,)
    delay_ns = batching.oldest.max_queue_delay_microseconds * 1000
    return lines + _when(BatchingPolicy(config.max_batch_size, preferred, delay_ns))


def _tensors(config: Any) -> list[str]:
    lines = []
    varying = [i.name for i in config.input if any(d < 0 for d in i.dims) and not i.allow_ragged_batch]
    ragged = [i.name for i in config.input if i.allow_ragged_batch]
    optional = [i.name for i in config.input if i.optional]
    shapes = [i.name for i in config.input if i.is_shape_tensor]
    if not config.input:
        lines.append("Its inputs are not in the configuration (they come from the model's file).")
    if varying:
        lines.append(
            f"Inputs {_names(varying)} have variable dims: only requests with equal shapes (beyond the batch "
            "dimension) batch; another shape closes the batch. Remedy for mixed traffic: pad to a few shapes, or "
            "allow_ragged_batch if the model can take it."
        )
    if ragged:
        lines.append(f"Inputs {_names(ragged)} are ragged: they batch whatever their shape.")
    if optional:
        lines.append(f"Inputs {_names(optional)} are optional: only requests that bring the same ones batch.")
    if shapes:
        lines.append(f"Inputs {_names(shapes)} are shape tensors: only requests with equal values batch.")
    if config.input and not (varying or optional or shapes):
        lines.append("Every request can batch with every other.")
    return lines


def _when(policy: BatchingPolicy) -> list[str]:
    lines = []
    if policy.preferred != (policy.max_batch_size,):
        sizes = ", ".join(map(str, policy.preferred))
        lines.append(
            f"A batch whose size is a preferred one ({sizes}) goes at once, the largest of them first."
        )
    if policy.delay_ns:
        lines.append(
            f"Otherwise it waits until its oldest request has waited {policy.delay_ns // 1000} us "
            "(max_queue_delay_microseconds), even if an instance is idle."
        )
    else:
        lines.append(
            "There is no delay: an idle instance takes what is there, so batches form only while all instances are "
            "busy. Remedy for small batches under light load: set max_queue_delay_microseconds."
        )
    return lines


def _queues(policy: BatchingPolicy) -> list[str]:
    if len(policy.levels) == 1:
        return [f"The queue {_queue(policy.levels[0])}."]
    return [
        f"There are {len(policy.levels)} priority levels, 1 is served first; requests without priority are of level "
        f"{policy.default_level}.",
        *(f"{span} {_queue(level)}." for span, level in _spans(policy)),
    ]


def _spans(policy: BatchingPolicy) -> Iterator[tuple[str, QueuePolicy]]:
    """Levels with their policy; three and more in a row that have the same one are told together."""
    for level, rows in itertools.groupby(enumerate(policy.levels, 1), lambda row: row[1]):
        numbers = [number for number, _ in rows]
        if len(numbers) > 2:
            yield f"Each of the levels {numbers[0]} to {numbers[-1]}", level
        else:
            for number in numbers:
                yield f"Level {number}", level


def _queue(level: QueuePolicy) -> str:
    requests = "request" if level.max_size == 1 else "requests"
    size = (
        f"holds {level.max_size} waiting {requests} and refuses more"
        if level.max_size
        else "has no size limit"
    )
    if not level.timeout_us:
        return f"{size}; requests wait as long as it takes"
    action = "go behind the others" if level.delay else "are refused"
    override = ", sooner if they ask for it" if level.override else ""
    return f"{size}; requests that have waited {level.timeout_us} us {action}{override}"


def _ahead(policy: BatchingPolicy) -> str:
    if policy.exact:
        return "No batch is prepared ahead: limits, timeouts and priorities are exact."
    return "A batch that cannot get any better is prepared while its instance still works."


def _instances(config: Any) -> str:
    count = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group) or 1
    if count == 1:
        return "One instance executes, one batch after the other."
    return f"{count} instances execute side by side."


def _order(policy: BatchingPolicy) -> list[str]:
    if policy.preserve_ordering:
        return ["Responses leave in the order in which requests arrived."]
    return []


def _names(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
