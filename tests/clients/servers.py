"""The servers that other people's clients talk to.

The clients have an environment without neptrio, so the server is started with the Python that NEPTRIO_TEST_PYTHON names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.server import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "model_repository"
PYTHON = os.environ.get("NEPTRIO_TEST_PYTHON", sys.executable)


def example_server(*models: str, flags: list[str] | None = None) -> ServerProcess:
    """A server of the example repository with these models loaded, whose clients may load others."""
    return ServerProcess(
        EXAMPLES,
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        *(flags or []),
        python=PYTHON,
    )
