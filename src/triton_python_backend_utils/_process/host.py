"""What the model of a child may ask of the server, sent over the wire."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _host
from .tensors import tensor_out
from .wire import tensor_row

if TYPE_CHECKING:
    from .child import Child


class _Handle:
    """A call to another model under way."""

    def __init__(self, child: Child, id: int) -> None:
        self._child = child
        self._id = id

    def took(self, response: Any) -> None:
        self._child.send({"t": "took", "k": self._id}, [])

    def cancel(self) -> None:
        self._child.send({"t": "call_cancel", "k": self._id, "dropped": False}, [])

    def drop(self) -> None:
        self._child.send({"t": "call_cancel", "k": self._id, "dropped": True}, [])


class ChildHost(_host.Host):
    """What the model may ask of the server, over the wire."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def infer(self, request: Any, decoupled: bool, deliver: Any, blocking: bool) -> _Handle:
        child = self._child
        id = next(child.numbers)
        rows: list[dict[str, Any]] = []
        trace = request._trace
        message = {
            "t": "call",
            "k": id,
            "model": request._model_name,
            "version": request._model_version,
            "id": str(request._request_id),
            "sequence": request._correlation_id,
            "flags": request._flags,
            "timeout": int(request._timeout),
            "p": request._parameters,
            "w": list(request._requested_output_names),
            "in": [tensor_out(t, rows) for t in request._inputs],
            "decoupled": decoupled,
            "parent": trace._key if trace is not None else None,
            "batch": child.batch if threading.current_thread() is threading.main_thread() else None,
            "blocking": blocking,
        }
        child.calls[id] = deliver
        child.send(message, rows)
        return _Handle(child, id)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        self._child.send({"t": "log", "level": level, "text": message, "file": file, "line": line}, [])

    def holds_memory(self, rows: list[tuple[str, int, int]]) -> None:
        self._child.send({"t": "memory", "rows": rows}, [])

    def load_model(self, name: str, files: dict[str, bytes], config: str) -> None:
        rows: list[dict[str, Any]] = []
        sent = [
            tensor_row(key, 2, [len(data)], np.frombuffer(data, np.uint8), rows)
            for key, data in files.items()
        ]
        self._child.ask({"op": "load", "name": name, "config": config, "files": sent}, rows)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._child.ask({"op": "unload", "name": name, "dependents": unload_dependents})

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._child.ask({"op": "ready", "name": name, "version": version}))

    def metric_family(self, name: str, description: str, kind: int) -> Any:
        return _Metric(self._child, self._child.ask({"op": "family", "args": [name, description, kind]}))


class _Metric:
    """A family or metric that lives in the server."""

    def __init__(self, child: Child, id: int) -> None:
        self._child = child
        self._id = id

    def Metric(self, labels: dict[str, str], buckets: Any) -> _Metric:
        return _Metric(
            self._child, self._child.ask({"op": "metric", "id": self._id, "args": [labels, buckets]})
        )

    def _change(self, name: str, *args: float) -> Any:
        return self._child.ask({"op": "change", "id": self._id, "method": name, "args": list(args)})

    def increment(self, value: float) -> None:
        self._change("increment", value)

    def set(self, value: float) -> None:
        self._change("set", value)

    def observe(self, value: float) -> None:
        self._change("observe", value)

    def value(self) -> float:
        return float(self._change("value"))

    def __del__(self) -> None:
        self._child.finished.put(-self._id)
