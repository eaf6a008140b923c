"""What in a configuration is code, or decides what code runs: libraries, interpreters, environments, compilers' options.

Whoever may send configurations, but no files, must not bring these along (service/repository.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# parameters of models: an interpreter, variables such as LD_PRELOAD, the user of a process, options that define macros,
# that a library is opened in place of the built-in backend, a library that decides what is executed together
PARAMETERS = (
    "EXECUTION_ENV_PATH",
    "ENVIRONMENT",
    "RUN_AS_UID",
    "RUN_AS_GID",
    "compile_options",
    "compiled",
    "TRITON_BATCH_STRATEGY_PATH",
)
# of these, what confines the code of a model: leaving it out lets the code do more
CONFINING = ("ENVIRONMENT", "RUN_AS_UID", "RUN_AS_GID")
# what decides where a model's code runs and with what: the process that completes a configuration runs that code, and may
# neither set these nor leave them out
PLACING = (
    *PARAMETERS,
    "MEMORY_LIMIT_BYTES",
    "NICE",
    "THREADS",
    "isolation",
    "environment",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
)
# options of accelerators that have one of these in their names lead to files: plug-ins, engines, caches
PATHS = ("path", "lib", "dir", "file", "config", "table")
# and these do not: shapes of a profile, and a switch
NO_PATHS = ("profile_", "use_native_calibration_table")


def leads_to_files(option: str) -> bool:
    """Whether an option of an accelerator names a file or a folder."""
    name = option.lower()
    return not any(part in name for part in NO_PATHS) and any(word in name for word in PATHS)


def confining(config: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of what confines a model's code in an inference.ModelConfig."""
    for key in CONFINING:
        if key in config.parameters:
            yield f"parameters.{key}", config.parameters[key].string_value


def code_of(config: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of everything of that kind in an inference.ModelConfig."""
    for library in config.model_operations.op_library_filename:
        yield "model_operations.op_library_filename", library
    if config.runtime.endswith(".so") and config.runtime != f"libtriton_{config.backend}.so":
        yield "runtime", config.runtime
    for key in PARAMETERS:
        if key in config.parameters:
            yield f"parameters.{key}", config.parameters[key].string_value
    listed = config.optimization.execution_accelerators
    for accelerator in (*listed.gpu_execution_accelerator, *listed.cpu_execution_accelerator):
        for key, value in accelerator.parameters.items():
            if leads_to_files(key):
                yield f"the parameter {key} of accelerator {accelerator.name}", value
