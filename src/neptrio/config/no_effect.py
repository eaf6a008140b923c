"""Configuration fields that are accepted and have no effect: `neptrio check` and the log name them.

They are hints for other backends or hardware. Models whose configurations were written for a Triton server
still load, and their owners are told which fields do nothing here. Source: docs/protocol/features.md A4.
"""

from __future__ import annotations

import difflib
from typing import Any

from neptrio.config.defaults import OWNERS, is_ensemble
from neptrio.config.isolation import parameter
from neptrio.config.locate import Path

# parameters of Python models and their processes: one that is nearly one of these is misspelt
PARAMETERS = (
    "isolation",
    "check_outputs",
    "keep_loaded",
    "idle_unload_seconds",
    "minimum_loaded_seconds",
    "ENVIRONMENT",
    "EXECUTION_ENV_PATH",
    "EXECUTE_TIMEOUT_SECONDS",
    "INITIALIZE_TIMEOUT_SECONDS",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "MEMORY_LIMIT_BYTES",
    "READ_ONLY_INPUTS",
    "RUN_AS_UID",
    "RUN_AS_GID",
    "THREADS",
    "NICE",
    "compiled",
)
_LOWER = {name.lower(): name for name in PARAMETERS}
ONNX = "onnxruntime"
KERNEL = "kernel"
BUILT_IN = ("identity", KERNEL, ONNX, "sequence", "python")


def has_own_backend(config: Any) -> bool:
    """Whether the model's backend is none of those that are built in, or asks for the library in the place of one: it reads
    its configuration itself."""
    return config.backend not in BUILT_IN or parameter(config, "compiled").lower() == "true"


def fields_without_effect(config: Any) -> list[tuple[Path, str]]:
    """(field path, why it has no effect) of each such field that is set in a completed ModelConfig.

    Of ensembles none is told, nor those that a backend may read which is not built in.
    """
    if is_ensemble(config):
        return []
    found = [] if has_own_backend(config) else _hints(config)
    if config.HasField("dynamic_batching") and config.max_batch_size == 0:
        why = "batches nothing: max_batch_size is 0, so requests are executed one by one"
        found.append((("dynamic_batching",), why))
    if not config.dynamic_batching.priority_levels:
        for field in ("default_priority_level", "priority_queue_policy"):
            if getattr(config.dynamic_batching, field):
                found.append((("dynamic_batching", field), "has no effect without priority_levels"))
    for key in sorted(config.parameters):
        near = difflib.get_close_matches(key.lower(), _LOWER, 1, 0.85)
        if near and key not in PARAMETERS:
            meant = _LOWER[near[0]]
            found.append(
                (("parameters", key), f"'{key}' is no parameter of this server, did you mean '{meant}'?")
            )
    owner = OWNERS.get(config.platform)
    if owner is not None and owner != config.backend:
        why = f"'{config.platform}' is a platform of backend '{owner}': backend '{config.backend}' serves the model nevertheless"
        found.append((("platform",), why))
    return found


def _hints(config: Any) -> list[tuple[Path, str]]:
    """Those that other backends and hardware know."""
    backend, optimization = config.backend, config.optimization
    found: list[tuple[Path, str]] = []
    if backend != ONNX:
        why = f"has no effect on models of backend '{backend}', only on those of '{ONNX}'"
        for field in ("batch_input", "batch_output"):
            if getattr(config, field):
                found.append(((field,), why))
        if optimization.graph.level:
            found.append((("optimization", "graph", "level"), why))
        if optimization.HasField("execution_accelerators"):
            found.append((("optimization", "execution_accelerators"), why))
    if backend != KERNEL and optimization.cuda.graphs:
        why = f"has no effect on models of backend '{backend}', only on those of '{KERNEL}'"
        found.append((("optimization", "cuda", "graphs"), why))
    if optimization.priority:
        found.append((("optimization", "priority"), "has no effect: instances have no priority on a device"))
    if optimization.eager_batching:
        why = "has no effect: inputs are gathered when the batch is closed"
        found.append((("optimization", "eager_batching"), why))
    if optimization.gather_kernel_buffer_threshold:
        why = "has no effect: inputs are not gathered by a kernel"
        found.append((("optimization", "gather_kernel_buffer_threshold"), why))
    for i, group in enumerate(config.instance_group):
        if group.profile:
            found.append((("instance_group", i, "profile"), "has no effect: profiles are TensorRT's"))
        if group.host_policy:
            why = "has no effect: this server has no host policies"
            found.append((("instance_group", i, "host_policy"), why))
    return found
