"""tools/audit.py: a known vulnerability fails it, a service that does not answer never does."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import audit

BAD = {
    "name": "h2", "version": "4.4.1",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["4.4.2"]}, {"id": "GHSA-2", "fix_versions": []}],
}  # fmt: skip
GOOD = {"name": "trio", "version": "0.30.0", "vulns": []}
UNKNOWN = {"name": "wheel", "skip_reason": "not found"}


@pytest.fixture
def answers() -> Iterator[tuple[str, list[str], dict[str, bytes]]]:
    """(the service's address, the paths that it was asked for, what it answers: replace "body")."""
    asked: list[str] = []
    answer = {"body": b'{"vulnerabilities": []}'}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if answer["body"] else 404)
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/api", asked, answer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(audit, "KEPT", tmp_path / "build" / "audited")
    monkeypatch.setattr(audit, "ANSWER_SECONDS", 60)  # the service is slow where the machine is
    return tmp_path / "build" / "audited"


def reports(monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
    monkeypatch.setattr(audit, "audited", lambda: ({"dependencies": list(found)}, ""))


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise AssertionError("pip-audit is not to be run")

    monkeypatch.setattr(audit, "audited", fail)


def test_a_service_that_does_not_answer_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, kept: Path
) -> None:
    never(monkeypatch)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert audit.main(f"http://127.0.0.1:{closed.getsockname()[1]}") == 0
    assert "known vulnerabilities are not checked: the package index does not" in capsys.readouterr().out
    address, _, answer = answers
    for body in (b"", b"no JSON", b"{}"):
        answer["body"] = body
        assert audit.main(address) == 0
        assert "known vulnerabilities are not checked" in capsys.readouterr().out
    assert audit.main("") == 0
    assert not kept.exists()


def test_a_service_that_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never(monkeypatch)
    monkeypatch.setattr(audit, "ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert audit.main(f"http://127.0.0.1:{listener.getsockname()[1]}") == 0
    assert "timed out" in capsys.readouterr().out


def test_a_vulnerability_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, kept: Path
) -> None:
    reports(monkeypatch, GOOD, BAD, UNKNOWN)
    address, asked, _ = answers
    assert audit.main(address) == 1
    assert asked == [f"/api/{audit.LOCK.read_text().split()[0].replace('==', '/')}/json"]
    printed = capsys.readouterr().out
    assert "h2 4.4.1: PYSEC-1, CVE-1; repaired in 4.4.2" in printed
    assert "h2 4.4.1: GHSA-2; repaired in no version yet" in printed
    assert not kept.exists()
    monkeypatch.setattr(audit, "IGNORED", {"CVE-1": "a reason", "GHSA-2": "another"})
    assert audit.main(address) == 0


def test_a_good_result_is_kept_for_these_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, kept: Path
) -> None:
    reports(monkeypatch, GOOD, UNKNOWN)
    address, asked, _ = answers
    assert audit.main(address) == 0
    assert "none in the 1 packages" in capsys.readouterr().out
    assert audit.main(address) == 0 and len(asked) == 1
    kept.write_text("of other packages")
    assert audit.main(address) == 0 and len(asked) == 2


def test_a_service_that_knows_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, kept: Path
) -> None:
    reports(monkeypatch, UNKNOWN)
    assert audit.main(answers[0]) == 0
    assert "the service knows none of the packages" in capsys.readouterr().out
    assert not kept.exists()


@pytest.mark.parametrize(
    ("statuses", "output", "reason"),
    [
        ([1], "", "pip-audit cannot be installed"),
        ([0, 1], "", "pip-audit says nothing: the last line"),
        ([0, 1], json.dumps({"dependencies": [BAD]}), ""),
    ],
)
def test_what_pip_audit_does(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], output: str, reason: str
) -> None:
    def run(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, statuses.pop(0), output, "first\nthe last line\n")

    monkeypatch.setattr(subprocess, "run", run)
    report, found = audit.audited()
    assert found == reason
    assert (report is None) == bool(reason)


def test_pip_audit_that_takes_too_long_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any
) -> None:
    def run(command: list[Any], **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert audit.main(answers[0]) == 0
    assert "it takes more than" in capsys.readouterr().out


def test_pip_says_where_its_index_is() -> None:
    assert audit.service().startswith("https://")
