"""Resource limits of a model's process. The process sets them itself before it imports the model.

As a program it sets limits and then becomes another program, which a model brings: `LIMITS PROGRAM ARGUMENT...`. Until
then nothing of the model has an effect: its environment variables come with PREFIX before their names.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import json
import os
import resource
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
PREFIX = "MODEL_"


def apply(limits: dict[str, Any]) -> None:
    """Sets the limits: `memory` (bytes of data), `nice`, `user` ([uid, gid]), `threads` (of numerical libraries).
    `withheld` are names of variables that the server has and this process was not given.

    Raises OSError.
    """
    memory = limits.get("memory")
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if limits.get("nice"):
        os.nice(limits["nice"])
    if limits.get("threads"):
        _blas_threads(limits["threads"])
    if limits.get("withheld"):
        os.environ.__class__ = _Withholding
        os.environ.withheld = frozenset(limits["withheld"])  # type: ignore[attr-defined]
    user = limits.get("user")
    if (
        user and os.getresuid() != (user[0],) * 3
    ):  # a process of a model with preload() is forked as that user
        _become(*user)


class _Withholding(type(os.environ)):  # type: ignore[misc]
    """os.environ of a process that was not given all of the server's variables: the KeyError of such a name says so."""

    withheld: frozenset[str] = frozenset()

    def __getitem__(self, key: str) -> str:
        try:
            return str(super().__getitem__(key))
        except KeyError:
            if key not in self.withheld:
                raise
        raise KeyError(
            f"{key} (the server has this variable and withholds it, because of environment=minimal: "
            f"name it in the model's parameter ENVIRONMENT)"
        )


def _become(uid: int, gid: int) -> None:
    """Changes to another user for good. The kernel then forgets that this process is to end with the server, so that is
    said again."""
    libc = ctypes.PyDLL(None)
    signal = ctypes.c_int(0)
    libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    os.setgroups([gid])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0)


def _blas_threads(count: int) -> None:
    """Sets the threads of numpy's OpenBLAS. The template has loaded it, with one thread, so that environment variables
    no longer have an effect on it."""
    function = blas_setter()
    if function is not None:
        function(count)


@functools.lru_cache(None)
def blas_setter() -> Any:
    """The function of numpy's OpenBLAS that sets its threads, None where there is none. The template looks for it, so that its
    processes need not: that takes each of them a millisecond and 0.7 MiB."""
    import numpy as np

    place = os.path.join(os.path.dirname(os.path.dirname(np.__file__)), "numpy.libs", "*openblas*")
    for file in glob.glob(place) or mapped(
        "openblas"
    ):  # an environment of conda has it among its own libraries
        library = ctypes.CDLL(file)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            function = getattr(library, name, None)
            if function is not None:
                return function
    return None


def mapped(part: str) -> list[str]:
    """The files that this process has mapped and whose names hold `part`."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return sorted(file for file in files if part in os.path.basename(file))


def become(arguments: list[str]) -> None:
    """Sets the limits that the first argument says (JSON), then executes the program that follows.

    Raises OSError.
    """
    apply(json.loads(arguments[0]))
    environ = {name[len(PREFIX) :]: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    os.execve(arguments[1], arguments[1:], environ)


if __name__ == "__main__":
    become(sys.argv[1:])
