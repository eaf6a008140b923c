"""Functions as models: `neptrio serve examples/functions.py:server --reload`, or `python examples/functions.py`.

    curl -s localhost:8000/v2/models/greet/infer \\
         -d '{"inputs": [{"name": "name", "datatype": "BYTES", "shape": [1], "data": ["you"]}]}'
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import neptrio

server = neptrio.Server()


@server.function
def greet(name: str, times: int = 1) -> str:
    """One text in, one text out; `times` may be left out."""
    return "hello " + " and ".join([name] * times)


@server.function(
    max_batch_size=32,
    inputs={"A": ("FP32", [-1]), "B": ("FP32", [-1])},
    outputs={"SUM": ("FP32", [-1])},
    batching={"max_queue_delay_microseconds": 500},
)
def add(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Gets the rows of many requests at once."""
    return A + B


@server.function
def words(text: str) -> Iterator[str]:
    """A response for each word: a decoupled model."""
    yield from text.split()


@server.function(instances=2)
class normalize:
    """A class is made once for each instance, so it is the place to load weights."""

    def __init__(self) -> None:
        self.epsilon = np.float32(1e-6)

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return (x - x.mean()) / (x.std() + self.epsilon)


if __name__ == "__main__":
    with server.running() as running:
        print(running.model("greet").infer({"name": ["you"]})["OUTPUT"][0].decode())
        print([r["OUTPUT"][0].decode() for r in running.model("words").stream({"text": ["one two three"]})])
        rows = ({"A": [[i, i]], "B": [[1, 2]]} for i in range(4))
        print([r["SUM"].tolist() for r in running.model("add").infer_each(rows)])
        print(running.model("normalize").infer({"x": [1, 2, 3]})["OUTPUT"].astype("f8").round(3).tolist())
