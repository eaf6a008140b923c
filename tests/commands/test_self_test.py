"""`neptrio self-test`: it says what works, and what does not."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from neptrio.commands import self_test


@pytest.mark.slow
def test_every_backend_and_protocol_is_tried() -> None:
    """Also where the environment names a proxy, which has no way to this machine's loopback addresses."""
    command = [sys.executable, "-W", "error", "-m", "neptrio", "self-test"]
    proxy = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
    without = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=without | proxy)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    left_out = self_test.lacking()
    for model in self_test.MODELS:
        tried = [
            line.partition(" (")[0] for line in lines if line.partition(" (")[0].endswith(f" to {model}")
        ]
        wanted = [f"ok      {protocol}: a request to {model}" for protocol in ("HTTP", "gRPC")]
        assert tried == ([] if model in left_out else wanted)
    for what in ("a trace", "the statistics", "the metrics", "the console", "the page", "it stops"):
        assert any(line.startswith(f"ok      {what}") for line in lines)
    assert lines[-1] == "everything works"


@pytest.mark.slow
def test_what_does_not_work_is_said_and_the_rest_is_still_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *rest, _ = self_test.MODELS["python"]
    models = {"identity": self_test.MODELS["identity"], "python": (*rest, 3)}
    monkeypatch.setattr(self_test, "MODELS", models)
    assert self_test.run(argparse.Namespace()) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert len(failed) == 2 and all(
        "a request to python: AssertionError: expected [0. 3." in line for line in failed
    )
    assert any(line.startswith("ok      it stops") for line in lines)
    assert lines[-1] == "something does not work: see above"
