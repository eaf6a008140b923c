"""What the process that completes a configuration, and runs the model's code, may not change in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from neptrio.backends.python.backend import apply_completed
from neptrio.config import model_config

WRITTEN = """
backend: "python"
parameters { key: "RUN_AS_UID" value: { string_value: "65534" } }
parameters { key: "MEMORY_LIMIT_BYTES" value: { string_value: "1073741824" } }
parameters { key: "own" value: { string_value: "written" } }
"""
COMPLETED = """{
    "backend": "mine", "runtime": "libmine.so", "max_batch_size": 4,
    "parameters": {"isolation": {"string_value": "none"}, "own": {"string_value": "completed"},
                   "MEMORY_LIMIT_BYTES": {"string_value": "0"}}
}"""


def test_what_confines_a_model_stays_as_it_was_written() -> None:
    context: Any = SimpleNamespace(name="m", config=model_config.parse_text(WRITTEN, "config.pbtxt"))
    apply_completed(context, COMPLETED)
    made = context.config
    assert (made.backend, made.runtime, made.max_batch_size) == ("python", "", 4)
    assert {key: made.parameters[key].string_value for key in made.parameters} == {
        "RUN_AS_UID": "65534",
        "MEMORY_LIMIT_BYTES": "1073741824",
        "own": "completed",
    }
