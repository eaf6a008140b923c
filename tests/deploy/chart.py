"""Renders the chart with Helm's own library, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "neptrio"
RELEASE, NAMESPACE = "demo", "models"


def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The objects that `helm install demo` would create. Raises helm_python.HelmError for wrong values."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values or {}, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kind -> the object, the first of a kind."""
    found: dict[str, dict[str, Any]] = {}
    for one in objects:
        found.setdefault(one["kind"], one)
    return found
