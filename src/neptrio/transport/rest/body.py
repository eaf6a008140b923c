"""The body of an infer request whose binary tensors are received apart from its JSON.

The JSON is read by the server, which must be the only one who can write there. The tensors may lie in memory that the
model's process can write to, so that they need not be copied for it (cext/rings/body_area).
"""

from __future__ import annotations

from typing import Any

import numpy as np


class SplitBody:
    """A body in two buffers. While it is received, `body[a:b]` is the writable rest of one of the two from a on."""

    __slots__ = ("binary", "text")

    def __init__(self, text_bytes: int, memory: Any) -> None:
        """`memory`: the buffer for what follows the JSON."""
        self.text = np.empty(text_bytes, np.uint8)
        self.binary: np.ndarray = np.frombuffer(memory, np.uint8)

    def whole(self) -> memoryview:
        """A copy in one buffer."""
        return memoryview(np.concatenate((self.text, self.binary)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.text) + len(self.binary)

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first = len(self.text)
        if wanted.start < first:
            return self.text[wanted]
        return self.binary[wanted.start - first : wanted.stop - first]
