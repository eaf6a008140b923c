"""Who waits for room is told of it, whatever others do."""

from __future__ import annotations

import logging

import pytest

from neptrio.request.back_pressure import let_send


def test_one_that_raises_loses_no_others(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def raises() -> None:
        raise ValueError("not this one")

    with caplog.at_level(logging.ERROR, "neptrio.request"):
        let_send([lambda: told.append("first"), raises, lambda: told.append("last")])
    assert told == ["first", "last"]
    assert "ValueError: not this one" in caplog.text
