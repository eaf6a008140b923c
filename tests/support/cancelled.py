"""How a Python model under test waits until it is cancelled: it asks, again and again.

Models can only ask (`request.is_cancelled()`, `sender.is_cancelled()`), here as on a Triton server;
nothing tells them. So the sleep between two questions stands in the model, and only here.
"""

from __future__ import annotations

from tests.support.waiting import SECONDS

# goes in front of a model's source
UNTIL_CANCELLED = f"""
import time


def until_cancelled(*asked):
    deadline = time.monotonic() + {SECONDS}
    while not any(one.is_cancelled() for one in asked):
        if time.monotonic() > deadline:
            raise TimeoutError("nobody cancelled in {SECONDS} s")
        time.sleep(0.001)
"""
