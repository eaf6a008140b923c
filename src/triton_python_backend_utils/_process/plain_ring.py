"""The process of an isolated model with an environment of its own, whose Python may be another version."""

from __future__ import annotations

from typing import Any

from . import plain_side, threads
from .own_socket import own_socket
from .ring_child import RingChild, make_back


class PlainRingChild(RingChild):
    """The process of a model with an interpreter of its own."""

    def make_end(self, memory: int, bell: int, rings: dict[str, Any]) -> Any:
        return plain_side.PlainSide(
            rings["library"],
            memory,
            bell,
            rings["layout"],
            self,
            make_back(self),
            rings["model"],
            rings["version"],
            rings["outputs"],
            rings["read_only"],
        )


def main(descriptor: int) -> None:
    """Runs the process on the socket of that number."""
    threads.main(PlainRingChild(own_socket(descriptor)).run)
