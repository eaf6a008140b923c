"""What ONNX Runtime holds on a GPU is freed by the thread that is there for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from neptrio.backends.onnx.releases import Releases


def test_a_tensor_dies_on_the_thread_that_is_to_free_it(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []

    class Value:
        def __del__(self) -> None:
            freed.append(threading.current_thread().name)

    def at_once(job: Callable[[], None]) -> None:
        """The thread is done with the job before whoever posted it goes on."""
        thread = threading.Thread(target=job, name="releases")
        thread.start()
        thread.join()

    releases = Releases(0)
    monkeypatch.setattr(releases._thread, "post", at_once)
    held = releases.hold(Value())
    assert freed == []
    del held
    assert freed == ["releases"]
