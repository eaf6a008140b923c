"""auto_complete_config() of a Python model, which runs in a process of its own that ends with it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neptrio.backends.python.isolated_host import IsolatedHost
from neptrio.backends.python.process import Process
from neptrio.execution.backend import Abandonment
from neptrio.execution.model_host import ModelHost


def complete_config(
    name: str,
    python: str | None,
    path: Path,
    folder: str,
    config: str,
    limit: float,
    abandonment: Abandonment,
    services: ModelHost,
    environ: dict[str, str] | None = None,
    limits: dict[str, Any] | None = None,
    lent: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Runs the model's auto_complete_config() in a process of its own. Returns the configuration, None if the model has
    no such method. `folder` is the version's; `lent` are descriptors that the process is given. What it asks `services` for
    meanwhile, and what it logs, is handled as that of an instance."""
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    host = IsolatedHost(name, name, services)

    def message(process: Process, message: dict[str, Any]) -> None:
        if not host.message(process, message):
            answers.put(message)

    process = Process(
        *(name, python, message, lambda _: answers.put(None)),
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
        host.forget()
