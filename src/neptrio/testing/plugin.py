"""Fixtures for pytest: `pytest_plugins = ["neptrio.testing.plugin"]` in the top conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Unpack

import pytest

from neptrio.embedded.server_settings import ServerSettings
from neptrio.testing.clock import Clock
from neptrio.testing.server import TestServer


@pytest.fixture
def neptrio_clock() -> Clock:
    """The clock of the test's servers."""
    return Clock()


@pytest.fixture
def neptrio_serve(neptrio_clock: Clock) -> Iterator[Callable[..., TestServer]]:
    """Starts servers of fake models, functions and folders, which end with the test: see TestServer."""
    with ExitStack() as stack:

        def serve(*what: Any, **settings: Unpack[ServerSettings]) -> TestServer:
            return stack.enter_context(TestServer(*what, clock=neptrio_clock, **settings))

        yield serve
