"""The interface between this package and the program that runs the model.

Inside the server, and inside the process of an isolated model, a Host does everything that goes beyond plain data:
inference on other models, logging, loading models, metrics. In a debugger or a unit test there is no Host: logging goes
to stderr, metrics are kept here, and the rest raises TritonModelException.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from ._errors import TritonModelException

FORKED = (
    "only the model's own process may ask the server, and this is one that the model has forked: return to it what it is to "
    "ask or send"
)


class Host:
    """What a program that runs models implements. Every method may be called from any thread."""

    model_dir = ""  # the folder of the version that it runs
    lent: Sequence[int] = ()  # descriptors that the server shares with this process, for its backend to know
    exclusive = False  # set by a model whose instances on one device are to execute one at a time

    def __init__(self) -> None:
        self.process = os.getpid()

    def infer(self, request: Any, decoupled: bool, deliver: Any, blocking: bool) -> Any:
        """Starts an inference; returns an object with cancel(), drop() and took(response).

        `blocking` says that the calling thread will wait for the responses.
        `deliver(response, final)` is called from any thread, once per response; a final without
        data comes as (None, True). It neither waits nor runs the model's code: others are heard behind it. For a request that
        is `_timed` the final one comes with a third argument, its times: see GivenReader.response().
        """
        raise NotImplementedError

    def infer_here(self, request: Any) -> Any:
        """One inference on a model that is not decoupled, for which the calling thread itself takes the response from
        the host; NotImplemented where it cannot, and infer() is to be used. The response may be None."""
        return NotImplemented

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """One log line of a model."""
        raise NotImplementedError

    def acquire_initialize_lock(self) -> None:
        """Called in initialize(): waits until no other instance of the model that has called it is in there."""

    def load_model(self, name: str, files: dict[str, bytes], config: str) -> None:
        """Loads a model and waits until it serves. Raises TritonModelException."""
        raise NotImplementedError

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service. Raises TritonModelException."""
        raise NotImplementedError

    def is_model_ready(self, name: str, version: str) -> bool:
        """True when the model can be used now."""
        raise NotImplementedError

    def described(self, subject: str, name: str, version: str) -> tuple[int, str]:
        """What the server says of itself or of a model, see service.described: (-1, JSON) or (an error's number, its text)."""
        raise NotImplementedError

    def is_model_decoupled(self, name: str, version: str) -> bool:
        """True when the model may answer a request several times. Raises TritonModelException for one that is not there."""
        raise NotImplementedError

    @property
    def server(self) -> Any:
        """Stands for the server that this leads to: hosts with the same one lead to the same server."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array for an output, from where it need not be copied if that is possible."""
        return np.empty(shape, dtype)

    def holds_memory(self, rows: list[tuple[str, int, int]]) -> None:
        """Tells the server what this process holds besides ordinary memory: (type, id, bytes), see Backend.memory_usage()."""

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        """Tells the server the durations of a response, which is the `place`th of its request. Who does so once counts all
        responses of the model; `outcome` is one of kinds.py."""

    def activity_reported(self, key: int, ns: int, name: str) -> None:
        """Tells the server a point in time of the trace of the request with that id."""

    def stated(self, request: tuple[int, ...]) -> None:
        """Tells the server the statistics of a request, as (its id, how, four times) or (its id, how); `how` is one of kinds.py."""

    def execution_begins(self) -> None:
        """Of the batch that is executed, by a model that reports executions: begins before those that follow."""

    def execution_measured(self, execution: tuple[int, ...]) -> None:
        """Tells the server of an execution that execute() does not wait for, as (batch size, four times)."""

    def stated_with_answers(self, requests: list[tuple[int, ...]], executions: list[tuple[int, ...]]) -> None:
        """Both, of the batch that is executed: they go with its answers."""

    def answer_first(self, count: int, responses: Any) -> None:
        """Answers the first `count` requests of the batch that is executed, as an execution of their own, with what execute()
        would return for them; what it returns in the end is of the requests behind them."""
        raise NotImplementedError

    def metric_family(self, name: str, description: str, kind: int) -> Any:
        """A family of custom metrics: Metric(labels, buckets) makes its metrics."""
        raise NotImplementedError


_current: ContextVar[Host | None] = ContextVar("triton_python_backend_host", default=None)
_default: list[Host] = []
# the version's folder while a model completes its configuration where nobody enters a host
completing: ContextVar[str] = ContextVar("triton_python_backend_completing", default="")


def enter(host: Host | None) -> Any:
    """Makes `host` the current one for this thread or task; undo with leave(token)."""
    return _current.set(host)


def leave(token: Any) -> None:
    """Undoes enter()."""
    _current.reset(token)


def install(host: Host) -> None:
    """Makes `host` the one that threads started by models use."""
    _default.append(host)


def uninstall(host: Host) -> None:
    """Undoes install()."""
    if host in _default:
        _default.remove(host)


def find() -> Host | None:
    """The host for this thread, if any. A thread that a model started has one only where all lead to the same server; a
    process that it forked has none."""
    host = _found()
    return None if host is None or host.process != os.getpid() else host


def _found() -> Host | None:
    host = _current.get()
    if host is None and _default and not _several():
        host = _default[-1]
    return host


def forked() -> bool:
    """Whether this is a process that a model has forked."""
    host = _found()
    return host is not None and host.process != os.getpid()


def _several() -> bool:
    return len({id(host.server) for host in _default}) > 1


def require(what: str) -> Host:
    """The host for this thread. Raises TritonModelException when there is none."""
    host = _found()
    if host is not None and host.process != os.getpid():
        raise TritonModelException(f"{what} is refused: {FORKED}")
    if host is None and _several():
        raise TritonModelException(
            f"{what} needs to know the server, and several run in this process; start the thread with "
            "contextvars.copy_context().run, which tells it"
        )
    if host is None:
        raise TritonModelException(f"{what} needs a running server; this process is none")
    return host
