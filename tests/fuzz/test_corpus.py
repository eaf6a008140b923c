"""Every input of the corpus once more: what fuzzers have found stays repaired, and the targets keep working."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 1 << 20  # of all of it: a clone should not notice


def test_each_target_has_a_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert all(list((CORPUS / name).iterdir()) for name in TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MOST_BYTES


def inputs() -> Iterator[Path]:
    yield from sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus(target: str) -> None:
    if target == "http2" and find_spec("neptrio.transport.http2.nghttp2_session") is None:
        pytest.skip("built without libnghttp2")
    for path in inputs():
        if path.parent.name == target:
            try:
                TARGETS[target](path.read_bytes())
            except Exception as error:
                raise AssertionError(f"{path} fails") from error
