"""Servers whose models are functions of this file."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Annotated, Any, Optional

import numpy as np
import numpy.typing as npt

import neptrio

Floats = npt.NDArray[np.float32]
Matrix = Annotated[np.ndarray, neptrio.TensorSpec("FP32", [2])]
calls: list[Any] = []
place: ContextVar[str] = ContextVar("place", default="nowhere")
gate = threading.Event()  # hold() returns when it is set


def new_server(**settings: Any) -> neptrio.Server:
    """A server with a model of each kind."""
    server = neptrio.Server(**settings)
    calls.clear()
    gate.clear()

    @server.function
    def double(x: Floats) -> Floats:
        return 2 * x

    @server.function(
        max_batch_size=8,
        inputs={"A": ("FP32", [-1]), "B": ("FP32", [-1])},
        outputs={"SUM": ("FP32", [-1])},
        batching={"max_queue_delay_microseconds": 20_000},
    )
    def add(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        calls.append(len(A))
        if np.isnan(A).any():
            raise ValueError("no number")
        return A + B

    @server.function
    def greet(name: str, times: int = 1) -> str:
        if not name:
            raise neptrio.InvalidArgument("nobody to greet")
        return f"hello {name} " * times

    @server.function
    def maybe(x: float | None, y: Optional[Floats] = None) -> str:  # noqa: UP045  # both are written
        return f"{x} {None if y is None else y.tolist()}"

    @server.function(max_batch_size=4, batching={"max_queue_delay_microseconds": 20_000})
    def rows(x: Matrix, bias: Matrix | None) -> Matrix:
        return x if bias is None else x + bias

    @server.function
    def count(n: int, context: neptrio.Context) -> Iterator[int]:
        for i in range(n):
            if context.cancelled:
                calls.append("cancelled")
                return
            yield i

    @server.function
    async def count_async(n: int) -> AsyncIterator[Annotated[np.ndarray, neptrio.TensorSpec("INT64", [1])]]:
        for i in range(n):
            await asyncio.sleep(0)
            yield np.array([i])

    @server.function
    def endless(n: int) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            calls.append("endless closed")

    @server.function
    async def endless_async(n: int) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                yield i
        finally:
            calls.append("endless_async closed")

    @server.function
    async def scoped(n: int) -> AsyncIterator[str]:
        token = place.set("here")
        try:
            async with asyncio.timeout(0.2):
                for _ in range(2):
                    yield place.get()
                await asyncio.Event().wait()
        except TimeoutError:
            yield "late"
        finally:
            place.reset(token)

    @server.function(instances=2)
    def hold(x: Floats) -> Floats:
        gate.wait(60)
        return x

    @server.function(
        config={
            "sequence_batching": {
                "max_sequence_idle_microseconds": 60_000_000,
                "control_input": [
                    {
                        "name": "START",
                        "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}],
                    }
                ],
            }
        },
        inputs={"x": ("INT64", [1]), "START": ("INT32", [1])},
        outputs={"total": ("INT64", [1])},
    )
    class accumulate:  # the class's name is the model's; -1 fails
        def __init__(self) -> None:
            self.total = np.zeros(1, np.int64)

        def __call__(self, x: np.ndarray, START: np.ndarray) -> dict[str, np.ndarray]:
            if START[0]:
                self.total = np.zeros(1, np.int64)
            if x[0] == -1:
                raise ValueError("no amount")
            self.total = self.total + x
            return {"total": self.total}

        def close(self) -> None:
            calls.append("closed")

    return server
