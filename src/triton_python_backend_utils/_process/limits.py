"""Resource limits of a model's process. The process sets them itself before it imports the model."""

from __future__ import annotations

import ctypes
import glob
import os
import resource
from typing import Any

import numpy as np


def apply(limits: dict[str, Any]) -> None:
    """Sets the limits: `memory` (bytes of data), `nice`, `user` ([uid, gid]), `threads` (of numerical libraries).

    Raises OSError.
    """
    memory = limits.get("memory")
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if limits.get("nice"):
        os.nice(limits["nice"])
    if limits.get("threads"):
        _blas_threads(limits["threads"])
    user = limits.get("user")
    if user:
        uid, gid = user
        os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _blas_threads(count: int) -> None:
    """Sets the threads of numpy's OpenBLAS. The template has loaded it, with one thread, so that environment variables
    no longer have an effect on it."""
    place = os.path.join(os.path.dirname(os.path.dirname(np.__file__)), "numpy.libs", "*openblas*")
    for file in glob.glob(place):
        library = ctypes.CDLL(file)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads",
        ):
            function = getattr(library, name, None)
            if function is not None:
                function(count)
                return
