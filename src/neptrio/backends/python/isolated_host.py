"""What an isolated model may ask of the server: inferences, loads and unloads, metrics, its log.

The child asks over its socket and gets the answer there. For a model in the server's process,
neptrio.backends.python.bls does the same.

Rules:
 1. A call is kept in a table until its last response. When the child ends, all calls in the table are cancelled.
 2. Questions that must wait for the trio thread (load, unload, readiness) are answered from there. So the reader thread
    never waits, and no question takes a thread.
 3. What a child can have the server keep is counted: open calls, unanswered questions, metrics. Beyond the limit a call or
    question is answered with an error.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from neptrio.backends.python.bls import Answer, Call, InProcessHost, OnLoop
from neptrio.backends.python.convert import NUMBERS
from neptrio.backends.python.process import Process
from neptrio.backends.python.ring_reader import check_tensor
from neptrio.errors import Unavailable
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.request import foreign_memory
from neptrio.request.infer_request import InferRequest, InferResponse, RequestedOutput, Tensor, tensor_at
from neptrio.rings.message import Violation
from triton_python_backend_utils._process.wire import Lease, tensor_row
from triton_python_backend_utils._types import BYTES

foreign_memory.declare(Lease)

# what a model may do with a metric of its own
MOST_CALLS = 16_384  # of other models, at once
MOST_QUESTIONS = 1_000  # to the repository, at once
MOST_METRICS = 10_000  # families and metrics, which stay until the child lets go of them
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
        self._questions: set[tuple[Process, int]] = set()  # that the trio thread has not answered

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
        if len(self._calls) >= MOST_CALLS:
            deliver(InferResponse(None, too_many_calls()), True)
            return
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
        key = message["k"]
        question = (process, key)

        def answer(value: Any, failure: str | None) -> None:
            self._questions.discard(question)
            process.post_message({"t": "reply", "k": key, "value": value, "error": failure})

        def refuse(error: Exception) -> None:
            process.post_message({"t": "reply", "k": key, "value": None, "error": text_of(error)})

        try:
            if message["op"] not in ("load", "unload", "ready"):
                answer(self._asked_for(message), None)
            elif len(self._questions) >= MOST_QUESTIONS:
                refuse(Unavailable(f"{MOST_QUESTIONS} questions of this process are not answered yet"))
            else:
                self._questions.add(question)
                self._ask_repository(process, message, answer)
        except Exception as error:
            answer(None, text_of(error))

    def _ask_repository(self, process: Process, message: dict[str, Any], answer: Answer) -> None:
        op, name = message["op"], message["name"]
        if op == "load":
            blob = message["blob"]
            files = {row["n"]: received(process, row, blob).tobytes() for row in message["files"]}
            self._host.ask_load(name, files, message["config"], answer)
        elif op == "unload":
            self._host.ask_unload(name, message["dependents"], answer)
        else:
            self._host.ask_ready(name, message["version"], answer)

    def _asked_for(self, message: dict[str, Any]) -> Any:
        op = message["op"]
        if op == "change":
            if message["method"] not in CHANGES:
                raise Violation(f"a metric has no '{message['method']}'")
            return getattr(self._metrics[message["id"]], message["method"])(*message["args"])
        if len(self._metrics) >= MOST_METRICS:
            raise Unavailable(f"a process has at most {MOST_METRICS} metrics and families of them")
        if op == "family":
            made = self._host.metric_family(*message["args"])
        else:
            made = self._metrics[message["id"]].Metric(*message["args"])
        id = next(self._numbers)
        self._metrics[id] = made
        return id


def too_many_calls() -> Unavailable:
    """The error of a call beyond the limit."""
    return Unavailable(f"a process has at most {MOST_CALLS} calls of other models under way")


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
