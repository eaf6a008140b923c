"""The backend of ensembles, which have no files and no instances, only a graph."""

from __future__ import annotations

from neptrio.execution.backend import Backend, BackendInstance


class EnsembleBackend(Backend):
    """Makes no instances; scheduling.ensemble runs the steps."""

    platform = "ensemble"

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        raise AssertionError("an ensemble has no instances")
