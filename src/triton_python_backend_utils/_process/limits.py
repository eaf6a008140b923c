"""What a model's process may take: applied in the process itself, before the model is imported."""

from __future__ import annotations

import ctypes
import glob
import os
import resource
from typing import Any

import numpy as np


def apply(limits: dict[str, Any]) -> None:
    """`memory` in bytes of data, `nice`, `user` as [uid, gid], `threads` of numerical libraries. Raises OSError."""
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
    """numpy's OpenBLAS was loaded with one thread by the template; the environment comes too late for it."""
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
