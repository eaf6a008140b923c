"""Every answer belongs to its sequence and its position, under load (the long form is `make soak`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sequences.soak import soak

pytestmark = pytest.mark.slow


def test_soak(tmp_path: Path) -> None:
    if os.environ.get("NEPTRIO_SOAK") == "1":
        sequences, streams, seconds, idle_s = 20_000, 200, 60.0, 45.0
    else:
        sequences, streams, seconds, idle_s = 400, 20, 2.0, 1.5
    tally = soak(tmp_path, sequences, streams, seconds, idle_s)
    print(f"\n{tally}")
    assert tally.live_at_peak == sequences or tally.expired
    assert tally.answers > sequences
