"""The checks of a complete configuration (after auto-completion and defaults).

Every problem names file, line and field, what was expected and what was found; problems come in the order of
the fields. Loading stops at the first one, `neptrio check` shows all. Source: docs/protocol/features.md A4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from neptrio import datatypes
from neptrio.config import accelerators, demand, locate, output_checks, version_labels
from neptrio.config.defaults import CPU, GPU, is_ensemble
from neptrio.config.model_config import ConfigSource
from neptrio.config.no_effect import has_own_backend
from neptrio.config.problem import Problem
from neptrio.config.sequence_config import CORRID, CORRID_TYPES, VALUES
from neptrio.config.timing import tells_times
from neptrio.errors import InvalidArgument
from neptrio.observe.metrics_config import FIRST_RESPONSE

SIZES_OF_FORMAT = 3  # FORMAT_NHWC and FORMAT_NCHW are images
DELAY = 1  # inference.ModelQueuePolicy.TimeoutAction
TAG = re.compile(r"[A-Za-z0-9_]*")  # behind the "_" of its label
LONGEST_NAME = 255  # bytes; no file system in common use allows longer names

# A value above one of these is a mistake or an attack: loading would run out of memory or threads.
MOST_INSTANCES = 1024  # of a model version, a thread or process each
MOST_SLOTS = 1 << 20  # slots for sequences, over all instances
MOST_WARMUPS = 100_000  # executions of one sample
MOST_BYTES = 1 << 30  # bytes of one tensor that the server makes when it loads the model


def files(source: ConfigSource, config: Any, model_dir: Path) -> list[Problem]:
    """The problems with file names that lead out of their folders: to be asked before any file is read."""
    c = _Check(source, config, model_dir)
    _files(c)
    return c.problems


class _Check:
    """One configuration being checked. fail() notes a problem with a field, and checking goes on."""

    def __init__(self, source: ConfigSource, config: Any, model_dir: Path, complete: bool = True) -> None:
        self.source = source
        self.complete = complete  # True after auto-completion and defaults: what is missing stays missing
        self.config = config
        self.model_dir = model_dir
        self.problems: list[Problem] = []

    def fail(self, path: locate.Path, expected: str) -> None:
        self.problems.append(self.source.problem(path, f"{expected} (model '{self.config.name}')"))


def check(source: ConfigSource, config: Any, model_dir: Path) -> None:
    """Raises InvalidArgument for the first problem. `source` gives the line of each field."""
    found = problems(source, config, model_dir)
    if found:
        raise InvalidArgument(str(found[0]))


def problems(source: ConfigSource, config: Any, model_dir: Path) -> list[Problem]:
    """Every problem. `source` gives the line of each field."""
    c = _Check(source, config, model_dir)
    _batch_size(c)
    _kind(c)
    _tensors(c, "input")
    _tensors(c, "output")
    _version_policy(c)
    _scheduling(c)
    _instance_groups(c)
    _sizes(c)
    _warmup(c)
    _files(c)
    _metric_tags(c)
    _model_metrics(c)
    _own_parameters(c)
    _unsupported(c)
    return c.problems


def given(source: ConfigSource, config: Any, model_dir: Path) -> list[Problem]:
    """The problems that neither auto-completion nor defaults can repair.

    A Triton server does not accept a model folder with such a configuration; with any other problem it
    lists the version as failed.
    """
    c = _Check(source, config, model_dir, complete=False)
    _batch_size(c)
    _kind(c)
    _scheduling(c)
    return c.problems


def _batch_size(c: _Check) -> None:
    if c.config.max_batch_size < 0:
        c.fail(("max_batch_size",), f"expected 0 (no batching) or more, got {c.config.max_batch_size}")


def _scheduling(c: _Check) -> None:
    choice = c.config.WhichOneof("scheduling_choice")
    if choice == "dynamic_batching":
        _dynamic_batching(c)
    elif choice == "sequence_batching":
        _sequence_batching(c)


def _own_parameters(c: _Check) -> None:
    try:
        tells_times(c.config)
        demand.on_demand(c.config)
        demand.residence(c.config)
        output_checks.mode(c.config, {})
        version_labels.labels(c.config)
        version_labels.aliases(c.config)
    except InvalidArgument as error:
        c.fail(("parameters",), str(error))


def _kind(c: _Check) -> None:
    config = c.config
    if is_ensemble(config):
        if config.platform != "ensemble":
            c.fail(
                ("platform",),
                f"a model with ensemble_scheduling has the platform 'ensemble', got '{config.platform}'",
            )
        if not config.HasField("ensemble_scheduling"):
            c.fail(("platform",), "the platform 'ensemble' needs the field ensemble_scheduling")
        if config.backend:
            c.fail(("backend",), f"an ensemble has no backend of its own, got '{config.backend}'")
        if config.instance_group:
            c.fail(("instance_group",), "an ensemble has no instance_group: its steps' models have theirs")


def _tensors(c: _Check, field: str) -> None:
    names: set[str] = set()
    for i, tensor in enumerate(getattr(c.config, field)):
        at = (field, i)
        if not tensor.name:
            c.fail(at, f"every {field} must have a name")
        if tensor.name in names:
            c.fail((*at, "name"), f"two {field}s are called '{tensor.name}'")
        names.add(tensor.name)
        who = f"{field} '{tensor.name}'"
        if not tensor.data_type:
            c.fail(
                (*at, "data_type"),
                f"{who} must specify data_type, one of {', '.join(datatypes.FROM_CONFIG_NAME)}",
            )
        # an ONNX model may say of a tensor that it has any number of dimensions; its backend knows which
        if not tensor.dims and c.config.backend != "onnxruntime":
            c.fail(
                (*at, "dims"),
                f"{who} must specify dims; a scalar has dims [ 1 ] and reshape {{ shape: [ ] }}",
            )
        _dims(c, (*at, "dims"), tensor.dims, who)
        if tensor.HasField("reshape"):
            _reshape(c, (*at, "reshape"), tensor, who)
        if field == "input" and tensor.format and len(tensor.dims) != SIZES_OF_FORMAT:
            c.fail(
                (*at, "format"), f"{who} has an image format, so it needs 3 dims, got {_list(tensor.dims)}"
            )
        label = tensor.label_filename if field == "output" else ""
        if label and inside(label) and not (c.model_dir / label).is_file():
            c.fail(
                (*at, "label_filename"), f"{who} names a file that is not in the model's folder: '{label}'"
            )
        if tensor.is_shape_tensor or tensor.is_non_linear_format_io:
            c.fail(
                at,
                f"{who}: is_shape_tensor and is_non_linear_format_io belong to TensorRT, which is not served",
            )


def _dims(c: _Check, path: locate.Path, dims: Sequence[int], who: str) -> None:
    for i, d in enumerate(dims):
        if d < -1 or d == 0:
            c.fail((*path, i), f"{who}: a dimension is 1 or more, or -1 for any size, got {d}")


def _reshape(c: _Check, path: locate.Path, tensor: Any, who: str) -> None:
    before, after = list(tensor.dims), list(tensor.reshape.shape)
    _dims(c, (*path, "shape"), after, f"reshape of {who}")
    parts = [[math.prod(run) for run in _runs(shape)] for shape in (before, after)]
    if len(parts[0]) != len(parts[1]):
        c.fail(path, f"{who} has {len(parts[0]) - 1} variable dims but its reshape has {len(parts[1]) - 1}: "
            f"dims {_list(before)}, shape {_list(after)}")  # fmt: skip
    elif parts[0] != parts[1]:
        c.fail(path, f"{who} and its reshape must hold the same number of elements: dims {_list(before)}, shape "
            f"{_list(after)}")  # fmt: skip


def _runs(shape: list[int]) -> list[list[int]]:
    """The fixed dimensions before, between and after the variable ones."""
    runs: list[list[int]] = [[]]
    for d in shape:
        if d < 0:
            runs.append([])
        else:
            runs[-1].append(d)
    return runs


def _version_policy(c: _Check) -> None:
    policy = c.config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest" and policy.latest.num_versions < 1:
        c.fail(("version_policy", "latest", "num_versions"), "expected 1 or more, got 0")
    if choice == "specific":
        if not policy.specific.versions:
            c.fail(("version_policy", "specific"), "expected at least one version number")
        for i, version in enumerate(policy.specific.versions):
            if version < 1:
                c.fail(
                    ("version_policy", "specific", "versions", i), f"a version is 1 or more, got {version}"
                )


def _preferred(c: _Check, path: locate.Path, sizes: Sequence[int]) -> None:
    limit = c.config.max_batch_size
    for i, size in enumerate(sizes):
        if size < 1 or (size > limit and (limit or c.complete)):
            c.fail((*path, "preferred_batch_size", i),
                f"expected a batch size from 1 to max_batch_size ({limit}), got {size}")  # fmt: skip


def _dynamic_batching(c: _Check) -> None:
    d = c.config.dynamic_batching
    at = ("dynamic_batching",)
    _preferred(c, at, d.preferred_batch_size)
    levels = d.priority_levels
    if levels and not 1 <= d.default_priority_level <= levels:
        c.fail((*at, "default_priority_level"), f"expected a level from 1 to priority_levels ({levels}), got "
            f"{d.default_priority_level}")  # fmt: skip
    for level in d.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            c.fail(
                (*at, "priority_queue_policy"),
                f"expected levels from 1 to priority_levels ({levels}), got {level}",
            )
    if d.preserve_ordering:
        if levels > 1:
            c.fail(
                (*at, "preserve_ordering"), f"cannot keep the order of requests with {levels} priority levels"
            )
        policies = [d.default_queue_policy, *d.priority_queue_policy.values()]
        if any(policy.timeout_action == DELAY and policy.default_timeout_microseconds for policy in policies):
            c.fail(
                (*at, "preserve_ordering"), "cannot keep the order of requests when timeout_action is DELAY"
            )


def _sequence_batching(c: _Check) -> None:
    s = c.config.sequence_batching
    at = ("sequence_batching",)
    strategy = s.WhichOneof("strategy_choice")
    if strategy == "oldest":
        _preferred(c, (*at, "oldest"), s.oldest.preferred_batch_size)
        if s.oldest.max_candidate_sequences < 0:
            c.fail(
                (*at, "oldest", "max_candidate_sequences"),
                f"expected 0 or more, got {s.oldest.max_candidate_sequences}",
            )
    if strategy == "direct" and not 0 <= s.direct.minimum_slot_utilization <= 1:
        c.fail(
            (*at, "direct", "minimum_slot_utilization"),
            f"expected 0 to 1, got {s.direct.minimum_slot_utilization:g}",
        )
    kinds: set[int] = set()
    for i, control_input in enumerate(s.control_input):
        here = (*at, "control_input", i)
        if not control_input.name:
            c.fail(here, "every control_input must have a name")
        if not control_input.control:
            c.fail(here, f"control input '{control_input.name}' must specify a control")
        for j, control in enumerate(control_input.control):
            _control(c, (*here, "control", j), control, control_input.name)
            if control.kind in kinds:
                c.fail(
                    (*here, "control", j, "kind"), "this kind of control is given to another input already"
                )
            kinds.add(control.kind)
    if c.config.response_cache.enable:
        c.fail(("response_cache", "enable"), "the responses of a sequence cannot be cached")


def _control(c: _Check, path: locate.Path, control: Any, name: str) -> None:
    pairs = {field: getattr(control, field) for field in VALUES if len(getattr(control, field))}
    if control.kind == CORRID:
        if pairs:
            c.fail(
                (*path, next(iter(pairs))), f"the correlation id of '{name}' has a data_type and no values"
            )
        if control.data_type not in CORRID_TYPES:
            allowed = ", ".join(datatypes.CONFIG_NAME[number] for number in CORRID_TYPES)
            c.fail((*path, "data_type"), f"the correlation id of '{name}' has one of the types {allowed}")
        return
    if len(pairs) != 1:
        c.fail(
            path,
            f"control '{name}' must specify exactly one of int32_false_true, fp32_false_true and bool_false_true",
        )
        return
    field, values = next(iter(pairs.items()))
    if len(values) != 2:
        c.fail((*path, field), f"control '{name}' expects two values (for false and true), got {len(values)}")


def _instance_groups(c: _Check) -> None:
    names: set[str] = set()
    found = {gpu.index for gpu in accelerators.gpus()}
    for i, group in enumerate(c.config.instance_group):
        at = ("instance_group", i)
        if group.name in names:
            c.fail((*at, "name"), f"two instance groups are called '{group.name}'")
        names.add(group.name)
        if group.count < 1:
            c.fail((*at, "count"), f"expected 1 or more instances, got {group.count}")
        if group.kind == GPU:
            if not found:
                c.fail(
                    (*at, "kind"),
                    f"instance group '{group.name}' has kind KIND_GPU but no GPUs are available",
                )
            for j, gpu in enumerate(group.gpus):
                if found and gpu not in found:
                    there = ", ".join(map(str, sorted(found)))
                    c.fail(
                        (*at, "gpus", j),
                        f"instance group '{group.name}' names GPU {gpu}, available are {there}",
                    )
        elif group.kind == CPU and group.gpus:
            c.fail(
                (*at, "gpus"),
                f"instance group '{group.name}' has kind KIND_CPU but names GPUs {_list(group.gpus)}",
            )
        if group.secondary_devices and not has_own_backend(c.config):
            c.fail((*at, "secondary_devices"), "secondary devices are TensorRT's, which is not served")


def _sizes(c: _Check) -> None:
    """Limits what is made at load to sizes that a machine can hold."""
    config = c.config
    counts = [
        (max(group.count, 1) * max(len(group.gpus), 1), group.passive) for group in config.instance_group
    ]
    instances = sum(count for count, passive in counts if not passive)
    made = sum(count for count, _ in counts)
    if made > MOST_INSTANCES:
        c.fail(("instance_group",), f"expected at most {MOST_INSTANCES} instances, got {made}")
    if made and not instances:
        c.fail(
            ("instance_group",), "expected a group that is not passive: passive instances execute no requests"
        )
    if config.WhichOneof("scheduling_choice") != "sequence_batching":
        return
    s = config.sequence_batching
    oldest = s.WhichOneof("strategy_choice") == "oldest" and s.oldest.max_candidate_sequences > 0
    slots = s.oldest.max_candidate_sequences if oldest else max(config.max_batch_size, 1)
    if slots * max(instances, 1) > MOST_SLOTS:
        at = ("sequence_batching", "oldest", "max_candidate_sequences") if oldest else ("max_batch_size",)
        c.fail(
            at, f"expected at most {MOST_SLOTS} sequences over all instances, got {slots * max(instances, 1)}"
        )
    for i, state in enumerate(s.state):
        for dims in (state.dims, *(first.dims for first in state.initial_state)):
            _bytes(c, ("sequence_batching", "state", i, "dims"), dims, state.data_type)


def _bytes(c: _Check, path: locate.Path, dims: Sequence[int], data_type: int) -> None:
    size = math.prod(max(d, 1) for d in dims) * (datatypes.ITEM_SIZE.get(data_type, 0) or 4)
    if size > MOST_BYTES:
        c.fail(path, f"expected at most {MOST_BYTES} bytes, {_list(dims)} takes {size}")


def _warmup(c: _Check) -> None:
    inputs = {i.name: i for i in c.config.input}
    batching = c.config.sequence_batching
    controls = {i.name for i in batching.control_input} | {s.input_name for s in batching.state}
    for i, sample in enumerate(c.config.model_warmup):
        at = ("model_warmup", i)
        if sample.batch_size > max(1, c.config.max_batch_size):
            c.fail(
                (*at, "batch_size"),
                f"expected at most max_batch_size ({c.config.max_batch_size}), got {sample.batch_size}",
            )
        if sample.count > MOST_WARMUPS:
            c.fail((*at, "count"), f"expected at most {MOST_WARMUPS} executions, got count {sample.count}")
        for name, data in sample.inputs.items():
            here = (*at, "inputs")
            _bytes(c, here, data.dims, data.data_type)
            if name not in inputs and name not in controls:
                c.fail(here, f"warm-up sample '{sample.name}' gives an input '{name}' that the model does not have; it "
                    f"has {', '.join(inputs)}")  # fmt: skip
            if any(d < 0 for d in data.dims):
                c.fail(here, f"warm-up input '{name}' must have fixed dims, got {_list(data.dims)}")
            if name in inputs and data.data_type != inputs[name].data_type:
                got, want = (
                    datatypes.CONFIG_NAME.get(t, "none") for t in (data.data_type, inputs[name].data_type)
                )
                c.fail(here, f"warm-up input '{name}' must have data_type {want}, got {got}")
            file = data.input_data_file
            if file and inside(file) and not (c.model_dir / "warmup" / file).is_file():
                c.fail(
                    here, f"warm-up input '{name}' names a file that is not in the folder warmup: '{file}'"
                )


def inside(path: str) -> bool:
    """True when `path` is a valid relative file name that does not lead out of its folder."""
    parts = path.split("/")
    possible = "\0" not in path and all(len(part.encode()) <= LONGEST_NAME for part in parts)
    return possible and parts[0] != "" and ".." not in parts


def _files(c: _Check) -> None:
    """Every file that the configuration names must be below its folder."""
    config = c.config
    named: list[tuple[locate.Path, str, str]] = [
        (("default_model_filename",), config.default_model_filename, "the version's folder")
    ]
    for capability, name in config.cc_model_filenames.items():
        named.append((("cc_model_filenames", capability), name, "the version's folder"))
    for i, output in enumerate(config.output):
        named.append((("output", i, "label_filename"), output.label_filename, "the model's folder"))
    for i, sample in enumerate(config.model_warmup):
        for data in sample.inputs.values():
            named.append((("model_warmup", i, "inputs"), data.input_data_file, "the model's folder warmup/"))
    for i, state in enumerate(config.sequence_batching.state):
        for j, first in enumerate(state.initial_state):
            at = ("sequence_batching", "state", i, "initial_state", j, "data_file")
            named.append((at, first.data_file, "the model's folder initial_state/"))
    for path, name, folder in named:
        if name and not inside(name):
            c.fail(path, f"'{name}' must stay within {folder}")


def _metric_tags(c: _Check) -> None:
    for tag in c.config.metric_tags:
        if not TAG.fullmatch(tag):  # Prometheus reads nothing of a page with one label that it cannot read
            c.fail(("metric_tags",), f"a tag's name consists of ASCII letters, digits and '_', got {tag!r}")


def _model_metrics(c: _Check) -> None:
    for i, control in enumerate(c.config.model_metrics.metric_control):
        at: tuple[str | int, ...] = ("model_metrics", "metric_control", i)
        family = control.metric_identifier.family
        if not family:
            c.fail((*at, "metric_identifier"), f"must name a metric family, expected '{FIRST_RESPONSE}'")
        elif family != FIRST_RESPONSE:
            c.fail(
                (*at, "metric_identifier", "family"),
                f"unknown metric family '{family}', the one that can be configured is '{FIRST_RESPONSE}'",
            )
        if control.WhichOneof("metric_options") is None:
            continue
        buckets = list(control.histogram_options.buckets)
        if not buckets:
            c.fail((*at, "histogram_options"), "histogram_options must specify buckets")
        elif any(not a < b for a, b in pairwise(buckets)) or not all(map(math.isfinite, buckets)):
            c.fail(
                (*at, "histogram_options", "buckets"),
                f"the buckets of '{family}' must be finite and ascending, got {buckets}",
            )


def _unsupported(c: _Check) -> None:
    config = c.config
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        c.fail(("response_cache", "enable"), "the responses of a decoupled model cannot be cached")
    if config.model_repository_agents.agents:
        agent = config.model_repository_agents.agents[0].name
        c.fail(
            ("model_repository_agents",), f"repository agents are not supported by this server, got '{agent}'"
        )


def _list(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
