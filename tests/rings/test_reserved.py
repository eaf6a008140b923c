"""Where the system promises no more memory than it has, shared memory is there from the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triton_python_backend_utils._process import reserved


@pytest.mark.parametrize(("mode", "taken"), [("0", False), ("1", False), ("2", True), ("", False)])
def test_pages_are_taken_where_the_system_is_strict(
    mode: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "overcommit"
    if mode:
        said.write_text(f"{mode}\n")
    monkeypatch.setattr(reserved, "OVERCOMMIT", str(said))
    fd = reserved.sealed_memory("test", 1 << 20)
    try:
        assert (os.fstat(fd).st_blocks * 512 >= 1 << 20) == taken
    finally:
        os.close(fd)
