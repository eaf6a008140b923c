"""The container file: linted, and what it names is there. tools/image_test.py builds the image and runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest

from neptrio.cli import settings_of
from tests.deploy.chart import render

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "container" / "Containerfile"
TEXT = FILE.read_text()
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no wheel for this machine")
def test_the_linter_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, FILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wrong = TEXT.replace('ENTRYPOINT ["tini", "--", "neptrio"]', "ENTRYPOINT neptrio")
    assert wrong != TEXT
    done = subprocess.run([HADOLINT, "-"], input=wrong, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "DL3025" in done.stdout


def test_the_base_is_named_by_digest() -> None:
    base = re.search(r"^ARG PYTHON=(\S+)$", TEXT, re.M)
    assert base is not None and re.fullmatch(
        r"[\w./-]+:3\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base[1]
    )
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.M)) == {"${PYTHON}"}


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.M) for name in line.split()}
    assert copied == kept
    for name in copied:
        assert (ROOT / name).exists(), name
    assert "**/*.so" in ignored, "what was built here must not be copied"


def test_the_locked_packages_are_those_of_the_project() -> None:
    assert 'ARG LOCKED="run"' in TEXT and (ROOT / "requirements" / "run.txt").exists()


def test_the_chart_runs_it_as_its_user_and_on_its_ports() -> None:
    user = re.search(r"^USER (\d+):(\d+)$", TEXT, re.M)
    assert user is not None
    pod = next(one for one in render() if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user.groups()
    (container,) = pod["containers"]
    exposed = re.search(r"^EXPOSE (.+)$", TEXT, re.M)
    assert exposed is not None
    assert {str(port["containerPort"]) for port in container["ports"]} == set(exposed[1].split())
    assert "command" not in container, "the image's entry point is the server"


def test_the_commands_are_the_servers() -> None:
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", TEXT, re.M)[1])  # type: ignore[index]
    assert entry[0] == "tini" and entry[-1] == "neptrio"
    settings, _ = settings_of(json.loads(re.search(r"^CMD (.+)$", TEXT, re.M)[1]))  # type: ignore[index]
    health = re.search(r"http://127\.0\.0\.1:(\d+)(/[a-z0-9/]+)", TEXT)
    assert health is not None and (int(health[1]), health[2]) == (settings.http_port, "/v2/health/ready")
    assert not any(fnmatch(line, "*:latest*") for line in TEXT.splitlines())
