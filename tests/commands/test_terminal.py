"""What commands print of others' texts: nothing that a terminal obeys."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from neptrio import commands, terminal
from tests.support.repository import write_model

HOSTILE = "a\x1b]0;owned\x07\x9b2J\r\u202eb\ud800"
SHOWN = "a\\u001b]0;owned\\u0007\\u009b2J\\u000d\\u202eb\\ud800"


def printed(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    """What a command prints, which has nothing but text, line feeds and tabs."""
    commands.run(command, list(arguments))
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert all(letter.isprintable() or letter in "\n\t" for letter in text), text
    return text


def test_characters_that_a_terminal_obeys() -> None:
    assert terminal.shown(HOSTILE) == SHOWN
    assert json.loads(f'"{SHOWN}"') == HOSTILE  # where it is in JSON it is the same text
    for text in ("", "plain", "a\tb\n", "é 漢字 👩\u200d🚀"):
        assert terminal.shown(text) == text
    for number in (*range(32), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)):
        if chr(number) not in "\n\t":
            assert terminal.shown(chr(number)) == f"\\u{number:04x}"


def test_what_the_terminal_is_to_obey_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with terminal.guarded():
        print("\x1b", end="")
        terminal.command("\x1b[H")
        sys.stdout.writelines(["\r", "\n"])
    terminal.command("\x1b[J")
    assert out.getvalue() == "\\u001b\x1b[H\\u000d\n\x1b[J"


def test_trace_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "REQUEST_END",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    )
    stamps = [{"name": name, "ns": 1000 * i} for i, name in enumerate((*names, HOSTILE))]
    part = {"model_name": HOSTILE, "model_version": 1, "id": 1, "timestamps": stamps}
    (tmp_path / "trace.json").write_text(json.dumps([part]))
    for flags in ([], ["-t"]):
        assert SHOWN in printed(capsys, "trace", "summary", *flags, str(tmp_path / "trace.json"))


def test_check_and_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        tmp_path, "m", f'backend: "identity" default_model_filename: "{HOSTILE[:4]}" nonsense: "\x1b[2J"'
    )
    (tmp_path / "n\x1b[2J").mkdir()
    assert "\\u001b" in printed(capsys, "check", str(tmp_path))
    assert "\\u001b" in printed(capsys, "explain", f"--model-repository={tmp_path}", "n\x1b[2J")
