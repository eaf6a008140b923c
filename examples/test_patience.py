"""A test of a program that calls a model: docs/testing.md explains it. Run it with pytest."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import neptrio
from neptrio.testing import FakeModel


def test_a_caller_gives_up_after_an_hour(neptrio_serve, neptrio_clock):
    fake = FakeModel({"x": ("FP32", [1])}, {"y": ("FP32", [1])}).takes(7200).answers({"y": [3]})
    server = neptrio_serve(fake)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.model("fake").infer, {"x": [1]}, timeout=3600)
        fake.until_asked()
        neptrio_clock.jump(3600)
        with pytest.raises(neptrio.TritonError, match="deadline"):
            asked.result()
