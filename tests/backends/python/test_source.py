"""ModelSource: where a model's imports are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio.backends.python.source import ModelSource

CODE = """
def again():
    import json, numpy
    import helper
    return json, numpy.zeros(2).ctypes.data, helper.VALUE
"""


def test_files_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("VALUE = 7")
    source = ModelSource(tmp_path / "model.py", "m")
    try:
        module = source.load()
        assert module.again()[2] == 7
        looked: list[Path] = []

        def is_file(path: Path) -> bool:
            looked.append(path)
            return False

        monkeypatch.setattr(Path, "is_file", is_file)
        # numpy's C code imports on behalf of whoever asks an array for `ctypes`
        assert module.again()[2] == 7
        assert looked == []
    finally:
        source.unload()
