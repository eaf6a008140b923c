"""The end of a template: after the last of its processes, and when the model that it was started for is unwanted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.python import template as templates
from neptrio.backends.python.children import Birth
from neptrio.backends.python.environment_template import EnvironmentTemplate
from neptrio.backends.python.template import ModelTemplate
from neptrio.errors import Internal
from tests.backends.python.models import python_model
from tests.backends.python.test_rings import named
from tests.support.server import ServerProcess
from tests.support.waiting import until


def starters() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "templates"}


@pytest.mark.slow
@pytest.mark.skipif(not templates.SUPPORTED, reason="nothing can be forked from here")
def test_an_ended_template_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "LINGER", 0.0)
    before = starters()
    made = EnvironmentTemplate(sys.executable, dict(os.environ))
    for _ in range(2):  # it may be used again
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = made.fork("py:m", theirs.fileno(), dict(os.environ), {})
            assert len(starters() - before) == 1
            child.kill()
            child.wait()
        child.stdout.close()
        child.close()
        made.release()
        until(lambda: starters() <= before)


@pytest.mark.skipif(not templates.SUPPORTED, reason="nothing can be forked from here")
def test_a_template_of_a_model_is_not_started_after_it_was_closed() -> None:
    made = ModelTemplate("m", {}, dict(os.environ), {}, 60.0)
    made.close()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Internal, match="the model 'm' is unloaded"):
        made.fork("py:m", theirs.fileno(), dict(os.environ), {})


@pytest.mark.slow
@pytest.mark.skipif(not templates.SUPPORTED, reason="nothing can be forked from here")
def test_a_template_that_is_killed_at_its_first_start_is_started_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nmkdir "$0.started" && kill -KILL $$\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    made = EnvironmentTemplate(str(python), dict(os.environ))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = made.fork("py:m", theirs.fileno(), dict(os.environ), {})
        child.kill()
        child.wait()
    child.stdout.close()
    child.close()
    made.release()
    assert not made.unusable


@pytest.mark.slow
@pytest.mark.skipif(not templates.SUPPORTED, reason="nothing can be forked from here")
def test_a_template_whose_answer_nobody_waits_for_ends_without_a_word() -> None:
    """As where the server ends while it starts a model's process."""
    birth = Birth(60)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        arguments = [sys.executable, "-u", "-c", templates.BOOTSTRAP, str(theirs.fileno())]
        template = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    asked = {"title": "py:m", "server": os.getpid(), "environ": {}, "limits": {}, "rings": "compiled"}
    with ours, open(os.devnull) as null, template:
        descriptors = [null.fileno(), null.fileno(), birth.theirs.fileno()]
        socket.send_fds(ours, [json.dumps(asked).encode()], descriptors)
        birth.sent()
        birth.give_up()  # which ends the process that it forks
        ours.close()
        assert template.communicate(timeout=60) == (None, b"")
    assert template.returncode == 0
    birth.close()


# its preload() says that it has begun, and never returns
PRELOADS_FOR_EVER = """
import os
from pathlib import Path

def preload(args):
    pipe = os.open(Path(__file__).parents[1] / "pipe", os.O_RDWR)
    print("preload has begun", flush=True)
    os.read(pipe, 1)

class TritonPythonModel:
    def execute(self, requests):
        return []
"""


@pytest.mark.slow
def test_a_preload_ends_with_the_load_that_is_given_up(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "endless", PRELOADS_FOR_EVER)
    os.mkfifo(folder / "pipe")
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:

        def load() -> None:
            with (
                httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
                pytest.raises(InferenceServerException),
            ):
                client.load_model("endless")

        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        server.until_logged("preload has begun")
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            client.unload_model("endless")
        until(lambda: not named(server, "py:endless"), "its process is gone")
        loading.join(60)
