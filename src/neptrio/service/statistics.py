"""The statistics extension (seed 001)."""

from __future__ import annotations

from typing import Any

from neptrio.errors import InvalidArgument
from neptrio.repository.manager import RepositoryManager


class StatisticsService:
    """Per-version statistics as plain values."""

    def __init__(self, repository: RepositoryManager) -> None:
        self._repository = repository

    def model_statistics(self, name: str, version: str) -> dict[str, Any]:
        """The $stats_model_response. Raises InvalidArgument for an unknown model or version."""
        models = self._repository.ready_models()
        if name:
            models = [m for m in models if m.name == name]
            if not models:
                raise InvalidArgument(f"requested model '{name}' is not available")
            if version:
                models = [m for m in models if m.version == version]
                if not models:
                    raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return {
            "model_stats": [{"name": m.name, "version": m.version, **m.counters.snapshot()} for m in models]
        }
