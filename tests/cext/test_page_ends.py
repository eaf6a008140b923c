"""Readers of the compiled modules against texts that end where memory ends.

A reader that looks one byte past its text is killed there, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.page_end import READERS, PageEnd

NAMES = [name for name in READERS if name != "http2" or find_spec("neptrio.transport.http2.nghttp2_session")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_reader_looks_past_its_text(name: str) -> None:
    done = run("-m", "tests.support.page_end", name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10


@pytest.mark.slow
def test_the_closed_page_is_closed() -> None:
    """Otherwise the test above could not fail."""
    text = "import ctypes; from tests.support.page_end import PageEnd; p = PageEnd(10); v = p.put(b'x');"
    end = "ctypes.string_at(ctypes.addressof(ctypes.c_ubyte.from_buffer(v)), {})"
    assert run("-c", text + end.format(1)).returncode == 0
    assert run("-c", text + end.format(2)).returncode < 0


def test_what_was_put_there_is_read() -> None:
    assert bytes(PageEnd(10).put(b"text")) == b"text"
