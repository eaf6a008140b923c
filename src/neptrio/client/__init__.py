"""A small trio client for gRPC: unary inference, streams, and sequences.

async with open_client("localhost:8001") as client:
    outputs = (await client.infer("simple", {"INPUT0": a, "INPUT1": b})).outputs
    async with client.sequence("model") as s:
        first = await s.send({"INPUT": x})
        final = await s.send({"INPUT": y}, last=True)
"""

from __future__ import annotations

from neptrio.client.client import (
    Client,
    InferenceError,
    Result,
    Sequence,
    SequenceBroken,
    Stream,
    open_client,
)
from neptrio.client.connection import ConnectionLost

__all__ = [
    "Client",
    "ConnectionLost",
    "InferenceError",
    "Result",
    "Sequence",
    "SequenceBroken",
    "Stream",
    "open_client",
]
