"""What a server says of a model."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def stats(server: Any, model: str, query: str = "live=true") -> dict[str, Any]:
    """The statistics of a model with one version; by default with what it holds now."""
    with urllib.request.urlopen(
        f"http://{server.http}/v2/models/{model}/stats?{query}", timeout=60
    ) as answer:
        (found,) = json.loads(answer.read())["model_stats"]
    return dict(found)
