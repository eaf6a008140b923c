"""Code for a Python model under test that waits until its request is cancelled, by asking repeatedly.

Models can only ask (`request.is_cancelled()`, `sender.is_cancelled()`), here as on a Triton server; nothing tells
them. So the sleep between two questions is in the model, and only here.
"""

from __future__ import annotations

from tests.support.waiting import SECONDS

# to be put in front of a model's source
UNTIL_CANCELLED = f"""
import time


def until_cancelled(*asked):
    deadline = time.monotonic() + {SECONDS}
    while not any(one.is_cancelled() for one in asked):
        if time.monotonic() > deadline:
            raise TimeoutError("nobody cancelled in {SECONDS} s")
        time.sleep(0.001)
"""
