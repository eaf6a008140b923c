"""What an isolated model may ask of the server: inferences, loads and unloads, metrics, its log.

The child asks over its socket and gets the answer there. For a model in the server's process,
neptrio.backends.python.bls does the same.

Rules:
 1. A call is kept in a table until its last response. When the child ends, all calls in the table are cancelled.
 2. Questions that must wait for the trio thread (load, unload, readiness) are answered by threads of their own, so that
    the reader thread never waits.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from neptrio.backends.python.bls import Call, InProcessHost, OnLoop
from neptrio.backends.python.convert import NUMBERS
from neptrio.backends.python.process import Process
from neptrio.backends.python.ring_reader import check_tensor
from neptrio.execution.model_host import ModelHost
from neptrio.loop import threads
from neptrio.request.infer_request import InferRequest, InferResponse, RequestedOutput, Tensor, tensor_at
from neptrio.rings.message import Violation
from triton_python_backend_utils._process.wire import Lease, tensor_row
from triton_python_backend_utils._types import BYTES

# what a model may do with a metric of its own
CHANGES = ("increment", "set", "observe", "value")


class IsolatedCall(Call):
    """A call of an isolated model, whose responses are sent over its socket without conversion."""

    def receive(self, response: InferResponse) -> Any:
        return response


class IsolatedHost:
    """Answers what an instance's child asks; it outlives a child and then serves the next."""

    def __init__(self, name: str, model_name: str, services: ModelHost) -> None:
        self._services = services
        self._host = InProcessHost(name, model_name, services)
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._metrics: dict[int, Any] = {}

    def message(self, process: Process, message: dict[str, Any]) -> bool:
        """Handles a message that asks the server for something; returns False for another. Reader thread."""
        kind = message["t"]
        if kind == "log":
            self._host.log(message["level"], message["text"], message["file"], message["line"])
        elif kind == "took":
            if message["k"] in self._calls:
                self._calls[message["k"]].took(None)
        elif kind == "call_cancel":
            call = self._calls.get(message["k"])
            if call is not None:
                if message["dropped"]:
                    call.drop()
                else:
                    call.cancel()
        elif kind == "ask":
            self._ask(process, message)
        elif kind == "forget":
            self._metrics.pop(message["id"], None)
        else:
            return False
        return True

    def take(self) -> list[Call]:
        """Removes and returns the open calls of a child that has ended, and forgets its metrics."""
        calls, self._calls = self._calls, {}
        self._metrics.clear()
        return list(calls.values())

    def call(
        self, process: Process, message: dict[str, Any], parent: InferRequest | None, waiting: Any
    ) -> None:
        """Starts an inference on another model. `parent` is the request for which it is made, and `waiting` the instance
        that is blocked until it is answered; each is None if unknown."""
        made = InferRequest()
        made.model_name = message["model"]
        made.model_version = "" if message["version"] < 0 else str(message["version"])
        made.id = message["id"]
        made.sequence_id = message["sequence"]
        made.sequence_start = bool(message["flags"] & 1)
        made.sequence_end = bool(message["flags"] & 2)
        made.timeout_us = message["timeout"]
        made.parameters = message["p"] or None
        made.inputs = [received(process, t, message["blob"]) for t in message["in"]]
        if message["w"]:
            made.outputs = [RequestedOutput(name) for name in dict.fromkeys(message["w"])]
        made.parent = parent
        made.owner = None if parent is None else parent.owner
        id = message["k"]

        def deliver(response: InferResponse | None, final: bool) -> None:
            if final:
                self._calls.pop(id, None)
            process.post(lambda: self._send_response(process, id, response, final))

        call = IsolatedCall(self._services, made, message["decoupled"], deliver, waiting)
        self._calls[id] = call
        self._services.completions.post(OnLoop(call.submit))

    def _send_response(self, process: Process, id: int, response: InferResponse | None, final: bool) -> None:
        rows: list[dict[str, Any]] = []
        answer: dict[str, Any] | None = None
        if response is not None and response.error is not None:
            error = response.error
            answer = {"e": [str(error), NUMBERS.get(error.code, 0)], "p": response.parameters}
        elif response is not None:
            answer = {"o": [row_of(t, rows) for t in response.outputs or ()], "p": response.parameters}
        process.send({"t": "call_response", "k": id, "a": answer, "final": final}, rows)

    def _ask(self, process: Process, message: dict[str, Any]) -> None:
        if message["op"] in ("load", "unload", "ready"):  # these wait for the trio thread
            try:
                threads.start(self._answer, process, message)
            except threads.NoThread as error:
                refused = {"t": "reply", "k": message["k"], "value": None, "error": str(error)}
                process.post_message(refused)
        else:
            self._answer(process, message)

    def _answer(self, process: Process, message: dict[str, Any]) -> None:
        value, failure = None, None
        try:
            value = self._asked_for(process, message)
        except Exception as error:
            failure = str(error)
        process.post_message({"t": "reply", "k": message["k"], "value": value, "error": failure})

    def _asked_for(self, process: Process, message: dict[str, Any]) -> Any:
        op = message["op"]
        if op == "load":
            blob = message["blob"]
            files = {row["n"]: received(process, row, blob).tobytes() for row in message["files"]}
            return self._host.load_model(message["name"], files, message["config"])
        if op == "unload":
            return self._host.unload_model(message["name"], message["dependents"])
        if op == "ready":
            return self._host.is_model_ready(message["name"], message["version"])
        if op == "change":
            if message["method"] not in CHANGES:
                raise Violation(f"a metric has no '{message['method']}'")
            return getattr(self._metrics[message["id"]], message["method"])(*message["args"])
        if op == "family":
            made = self._host.metric_family(*message["args"])
        else:
            made = self._metrics[message["id"]].Metric(*message["args"])
        id = next(self._numbers)
        self._metrics[id] = made
        return id


def row_of(tensor: Tensor, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The description of a tensor that is sent; adds its bytes to `rows` (see wire.tensor_row)."""
    data = np.frombuffer(tensor, dtype=np.uint8) if tensor.nbytes else b""  # type: ignore[call-overload]  # it is a buffer
    return tensor_row(tensor.name, tensor.dtype, tensor.shape, data, rows)


def received(process: Process, row: dict[str, Any], blob: bytearray) -> Tensor:
    """A tensor that was received; it keeps its memory, which is `blob` or a lease of the child's.

    Raises Violation for one that cannot be. Strings have a structure, so they are copied before it is looked at.
    """
    memory = process.wire.memory(row, blob)
    name, dtype, shape = row["n"], row["d"], tuple(row["s"])
    made: Tensor
    if isinstance(memory, Lease):
        made = tensor_at(name, dtype, shape, memory.address, memory.nbytes, memory)
        if dtype == BYTES:
            made = Tensor(name, dtype, shape, made.tobytes())
    else:
        made = Tensor(name, dtype, shape, memory, True)
    check_tensor(made)
    return made
