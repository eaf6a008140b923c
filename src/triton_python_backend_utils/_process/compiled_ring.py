"""The process of an isolated model with the server's own Python: its end of the rings is neptrio.rings.model_side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import neptrio.rings.model_side as ends

from .._execute import check_class, hidden
from .._host import completing
from . import modules, threads
from .own_socket import own_socket
from .ring_child import RingChild, make_back

PACKAGE = Path(ends.__file__).parents[1]
hidden += ["cext/", str(PACKAGE)]

preloaded: dict[str, Any] = {}  # path -> module, in a template of one model and what is forked from it


class CompiledRingChild(RingChild):
    """The process of a model with the server's interpreter."""

    def _load(self, path: str) -> Any:
        return preloaded.get(path) or super()._load(path)

    def make_end(self, memory: int, bell: int, rings: dict[str, Any]) -> Any:
        return ends.ModelSide(
            memory,
            bell,
            rings["layout"],
            self,
            make_back(self),
            rings["model"],
            rings["version"],
            rings["outputs"],
            rings["read_only"],
            rings["spin_ns"],
        )


def preload(asked: dict[str, Any]) -> None:
    """Imports a model's file and calls its preload(args); processes forked from this one then have both."""
    completing.set(os.path.join(asked["args"]["model_repository"], asked["args"]["model_version"]))
    module = modules.load(asked["path"])
    function = getattr(check_class(module, asked["path"]), "preload", None) or getattr(
        module, "preload", None
    )
    if function is not None:
        function(dict(asked["args"]))
    preloaded[asked["path"]] = module


def main(descriptor: int) -> None:
    """Runs the process on the socket of that number."""
    threads.main(CompiledRingChild(own_socket(descriptor)).run)
