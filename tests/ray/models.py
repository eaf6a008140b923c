"""What the replicas of the tests serve. Imported in their processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import neptrio

Floats = npt.NDArray[np.float32]
CONTROL = [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]


def make() -> neptrio.Server:
    """A server with a model of each kind."""
    server = neptrio.Server()

    @server.function
    def double(x: Floats) -> Floats:
        return 2 * x

    @server.function
    def process() -> int:
        """The process that it runs in."""
        return os.getpid()

    @server.function(instances=4)
    def slow(seconds: Floats) -> int:
        threading.Event().wait(float(seconds[0]))
        return os.getpid()

    @server.function(instances=2)
    def wait(path: str, context: neptrio.Context) -> bool:
        """Makes the file, and returns whether it was cancelled before the file was gone."""
        Path(path).touch()
        while Path(path).exists() and not context.cancelled:
            threading.Event().wait(0.01)
        Path(path).unlink(missing_ok=True)
        return context.cancelled

    @server.function
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    @server.function(
        name="total",
        instances=16,
        config={
            "sequence_batching": {
                "max_sequence_idle_microseconds": 120_000_000,
                "control_input": [{"name": "START", "control": CONTROL}],
            }
        },
        inputs={"x": ("INT64", [1]), "START": ("INT32", [1])},
        outputs={"total": ("INT64", [1])},
    )
    class Total:
        """Adds up a sequence's numbers."""

        def __init__(self) -> None:
            self.total = 0

        def __call__(self, x: np.ndarray, START: np.ndarray) -> dict[str, np.ndarray]:
            self.total = int(x[0]) + (0 if START[0] else self.total)
            return {"total": np.array([self.total])}

    return server
