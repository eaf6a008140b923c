"""When a request came, as a front end says, is believed within what can be."""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.frontend.verbs import believed
from neptrio.request.infer_request import monotonic_ns

EDGES = [0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("began", [-(2**70), -1, *EDGES, 2**70])
@pytest.mark.parametrize("whole", [-(2**70), -1, *EDGES, 2**70])
def test_receive_times_that_cannot_be(began: int, whole: int) -> None:
    first = monotonic_ns()
    start, end = believed([began, whole], first)
    assert first <= start <= end <= monotonic_ns()


@pytest.mark.parametrize(
    "received", [None, 1, [], [1], [1, 2, 3], [1, 2.5], ["1", "2"], [True, 2], [float("nan"), 1], {"a": 1}]
)
def test_receive_times_that_are_none(received: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        believed(received, 1)
