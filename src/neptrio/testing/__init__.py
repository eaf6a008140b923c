"""A test kit for programs that use the server, and for models: see docs/testing.md.

    from neptrio.testing import Clock, FakeModel, TestServer

    def test_a_request_that_waits_too_long(neptrio_serve, neptrio_clock): ...

The fixtures are in neptrio.testing.plugin: `pytest_plugins = ["neptrio.testing.plugin"]` in conftest.py.
"""

from __future__ import annotations

from neptrio.testing.clock import Clock as Clock
from neptrio.testing.fake_model import FakeModel as FakeModel
from neptrio.testing.fake_model import Record as Record
from neptrio.testing.server import TestServer as TestServer
