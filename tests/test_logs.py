"""Lines of the log and the flags that shape them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from neptrio.logs import LevelFilter, LineFormat
from neptrio.settings import Settings
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


def record(level: int) -> logging.LogRecord:
    return logging.LogRecord("neptrio.x", level, "file.py", 12, "hello %s", ("you",), None)


def test_formats() -> None:
    assert re.fullmatch(
        r"W\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ file\.py:12\] hello you",
        LineFormat(False).format(record(logging.WARNING)),
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ file\.py:12\] hello you",
        LineFormat(True).format(record(logging.INFO)),
    )


def test_levels_can_be_off() -> None:
    every = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
    off = LevelFilter(Settings(log_info=False, log_warning=False))
    assert [level for level in every if off.filter(record(level))] == [logging.ERROR]
    verbose = LevelFilter(Settings(log_verbose=1, log_error=False))
    assert [level for level in every if verbose.filter(record(level))] == [10, 20, 30]


def test_log_file(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "bad", 'backend: "nonesuch"')
    write_model(tmp_path / "models", "good", identity_config())
    log = tmp_path / "server.log"
    with ServerProcess(
        tmp_path / "models", "--exit-on-error=false", f"--log-file={log}", "--log-format=ISO8601"
    ) as server:
        assert "Z E " not in server.log()
    assert re.search(r"^\S+Z E \d+ \S+\] load failed for model 'bad'", log.read_text(), re.M)
