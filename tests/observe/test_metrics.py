"""The metrics document: made in slices, in the order of its families."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neptrio.loop import slices
from neptrio.observe import metrics
from neptrio.observe.exposition import Family, pairs
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model


def test_others_run_between_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can run does so once per slice; here each version is one."""
    monkeypatch.setattr(slices, "SLICE_NS", -1)
    for i in range(20):
        write_model(tmp_path, f"m{i}", identity_config())
    with EmbeddedServer(tmp_path, allow_metrics=True) as server:
        services, verbs = server.server.services, server.server.verbs
        document = metrics.Metrics(
            server.server.repository.ready_models, services, verbs, metrics.MetricsConfig()
        ).document

        async def count() -> tuple[int, bytes]:
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                parts = await document()
                nursery.cancel_scope.cancel()
            return turns, b"".join(parts)

        turns, text = server.run(count)
    assert turns >= 20
    assert text.count(b"nv_inference_count{") == 20
    assert text.count(b"# TYPE nv_inference_count ") == 1


def test_a_packed_family_is_the_same_text() -> None:
    whole, packed = (Family("f", 'a "help"\\', "gauge") for _ in range(2))
    for i in range(5):
        for family in (whole, packed):
            family.sample(pairs([("i", f'{i}"')]), i + 0.5)
        packed.pack(2)
    text = b"".join(whole.render())
    assert b"".join(packed.render()) == text
    assert text.startswith(b'# HELP f a "help"\\\\\n# TYPE f gauge\nf{i="0\\""} 0.5\n')
    assert len(packed.render()) > len(whole.render()) and Family("none", "", "gauge").render() == []
