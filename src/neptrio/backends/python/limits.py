"""The environment variables and resource limits of a model's process, from parameters of its configuration.

| parameter | what | default |
|---|---|---|
| `ENVIRONMENT` | `minimal`, `NAME`, `PREFIX_*`, `NAME=VALUE`, `*` (all), separated by commas | all |
| `MEMORY_LIMIT_BYTES` | data that the process may allocate | no limit |
| `THREADS` | threads of numerical libraries | cores divided by the model's instances |
| `NICE` | added to the process's niceness | 0 |
| `RUN_AS_UID`, `RUN_AS_GID` | another user, where the server may change to it | the server's |

The problem: models written for Triton read the server's variables, and one that is missing is no error but another
branch (`os.environ.get(NAME, "off")`). But variables also hold what no model should see.

Rules:
 1. A process gets the server's variables, as a Triton model's does.
 2. What the server's own variables are called (NEPTRIO_*) is withheld whatever a configuration asks for: there may be tokens
    among them. SHARED has those that models' processes need. A configuration may give a variable of that name (NAME=VALUE).
 3. With `minimal`, for one model or all, a process gets PASSED and what is named beside it. What it is not given then is said
    when the model is loaded, and in the KeyError of who looks for it.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from neptrio.cores import usable_cores
from neptrio.errors import InvalidArgument
from triton_python_backend_utils._process import limits as in_process

OWN = "NEPTRIO_"
SHARED = ("NEPTRIO_KERNEL_CACHE",)
MINIMAL = "minimal"
# variables by which programs find their files, language and devices; none of them holds a secret
PASSED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "LC_*",
        "TZ",
        "TERM",
        "TMPDIR",
        "TMP",
        "TEMP",
    ),
    *(
        "PYTHON*",
        "VIRTUAL_ENV",
        "CONDA_*",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "XDG_*",
        "SSL_CERT_*",
        "REQUESTS_CA_BUNDLE",
    ),
    *("OMP_*", "OPENBLAS_*", "MKL_*", "NUMEXPR_*", "KMP_*", "GOMP_*", "MALLOC_*"),
    *(
        "CUDA_*",
        "NVIDIA_*",
        "NCCL_*",
        "TORCH_*",
        "PYTORCH_*",
        "TF_*",
        "XLA_*",
        "JAX_*",
        "HF_HOME",
        "HF_HUB_OFFLINE",
    ),
    *(
        "TRANSFORMERS_*",
        "TRITON_*",
        "TRITONSERVER_*",
        "ASAN_OPTIONS",
        "UBSAN_OPTIONS",
        "COVERAGE_*",
        "COV_CORE_*",
    ),
)
THREADS = (
    *(
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "BLIS_NUM_THREADS",
)


def inherited(patterns: Iterable[str] = ()) -> dict[str, str]:
    """Those of the server's environment variables that PASSED or `patterns` name (rules 2 and 3)."""
    wanted = _any_of(tuple(patterns))
    return {name: value for name, value in os.environ.items() if wanted.match(name) and not _secret(name)}


def _secret(name: str) -> bool:
    return name.startswith(OWN) and name not in SHARED


@functools.lru_cache(64)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all patterns: trying them in turn would take a millisecond of each instance's start."""
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in (*PASSED, *SHARED, *patterns)))


def parameter(config: Any, key: str) -> str:
    return str(config.parameters[key].string_value).strip() if key in config.parameters else ""


def number(config: Any, key: str, least: int) -> int | None:
    """A parameter's whole number, None if it is not set. Raises InvalidArgument if it is below `least` or no number."""
    text = parameter(config, key)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidArgument(f"parameter '{key}' must be a whole number >= {least}, got '{text}'")
    return value


def _asked(config: Any, settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The patterns of the variables that a model's process gets, and variables given with their values. Raises
    InvalidArgument."""
    patterns, given = [], {}
    both = f"{settings.get('environment', '')},{parameter(config, 'ENVIRONMENT')}"
    for item in filter(None, (part.strip() for part in both.split(","))):
        name, sign, value = item.partition("=")
        if not name:
            raise InvalidArgument(
                f"parameter 'ENVIRONMENT' must be {MINIMAL}, NAME, PREFIX_* or NAME=VALUE, got '{item}'"
            )
        if sign:
            given[name] = value
        else:
            patterns.append(name)
    return (patterns if MINIMAL in patterns else ["*"]), given


def environment(config: Any, settings: dict[str, str]) -> dict[str, str]:
    """The environment variables of a model's process. Raises InvalidArgument."""
    patterns, given = _asked(config, settings)
    made = inherited(patterns)
    threads = str(_threads(config))
    for name in THREADS:
        made.setdefault(name, threads)
    return made | given


def withheld(config: Any, settings: dict[str, str]) -> list[str]:
    """The names of the server's variables that the model's process lacks because of `minimal`. Raises InvalidArgument."""
    patterns, given = _asked(config, settings)
    if "*" in patterns:
        return []
    left = os.environ.keys() - inherited(patterns).keys() - given.keys()
    return sorted(name for name in left if not _secret(name))


def _threads(config: Any) -> int:
    wanted = number(config, "THREADS", 1)
    if wanted is not None:
        return wanted
    instances = sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1
    return max(1, usable_cores() // instances)


def limits(config: Any) -> dict[str, Any]:
    """The limits that a model's process sets for itself when it starts. Raises InvalidArgument."""
    uid, gid = number(config, "RUN_AS_UID", 0), number(config, "RUN_AS_GID", 0)
    if gid is not None and uid is None:
        raise InvalidArgument("parameter 'RUN_AS_GID' needs RUN_AS_UID")
    return {
        "memory": number(config, "MEMORY_LIMIT_BYTES", 1 << 20),
        "nice": number(config, "NICE", -20),
        "threads": _threads(config),
        "user": None if uid is None else [uid, uid if gid is None else gid],
    }


def launched(
    program: list[str], environ: dict[str, str], limits: dict[str, Any] | None
) -> tuple[list[str], dict[str, str]]:
    """The arguments and variables that start `program` with its limits and as its user from its first instruction on.

    `program` begins with a path. The server's interpreter, of which the model decides nothing, sets both and then becomes
    the program. The threads of numerical libraries are left to the program.
    """
    own = {name: value for name, value in (limits or {}).items() if name not in ("threads", "withheld")}
    arguments = [sys.executable, "-I", "-S", str(in_process.__file__), json.dumps(own), *program]
    own_libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return arguments, own_libraries | {in_process.PREFIX + name: value for name, value in environ.items()}
