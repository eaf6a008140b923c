"""auto_complete_config() of a Python model, which runs in a process of its own that ends with it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neptrio.backends.python.process import Process
from neptrio.execution.backend import Abandonment


def complete_config(
    name: str,
    python: str | None,
    path: Path,
    folder: str,
    config: str,
    limit: float,
    abandonment: Abandonment,
    environ: dict[str, str] | None = None,
    limits: dict[str, Any] | None = None,
    lent: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Runs the model's auto_complete_config() in a process of its own. Returns the configuration, None if the model has
    no such method. `folder` is the version's; `lent` are descriptors that the process is given."""
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    process = Process(
        *(name, python, lambda _, m: answers.put(m), lambda _: answers.put(None)),
        environ=environ,
        limits=limits,
    )
    abandonment.add(process.kill)
    try:
        process.send(
            {"t": "auto_complete", "name": name, "path": str(path), "folder": folder, "config": config}, lent
        )
        answer = process.awaited(answers, "completed", limit, "auto_complete_config")
        found: dict[str, Any] | None = answer["config"]
        return found
    finally:
        process.kill()
        process.close()
