"""A process that forks while its program has a server: the child has the objects, and not the server's thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.python.models import isolated

PROGRAM = """
import os, sys, time
import neptrio

server = neptrio.Server()

@server.function
def double(x: float) -> float:
    return 2 * x

def refused(call):
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return "another process" in str(error) and time.monotonic() - began < 5
    return False

status = 1
with server.running() as running:
    model = running.model("double")
    assert model.infer({"x": [1.0]})["OUTPUT"].item() == 2
    child = os.fork()
    if child == 0:
        status = 0 if all(map(refused, (
            lambda: model.infer({"x": [1.0]}, timeout=1), lambda: list(model.stream({"x": [1.0]})),
            running.ready, model.ready, lambda: running.load("double"),
        ))) else 3
if child == 0:
    os._exit(status)
"""
PARENT = """
with server.running() as running:
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        running.load("double")  # reads the function's folder again
        print(running.model("double").infer({"x": [3.0]})["OUTPUT"].item())
if not child:
    os._exit(0)
"""
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
# both have processes for models, and the parent has another one made when the child has ended
BOTH = """
import os, sys
import numpy as np
import neptrio

def echoes(running):
    return running.model("echo").infer({"IN": np.ones(1, np.float32)}, timeout=30)["OUT"].item() == 1

with neptrio.Server(sys.argv[1]).running() as running:
    assert echoes(running)
    child = os.fork()
    if child == 0:
        status = 3
        try:
            with neptrio.Server(sys.argv[1]).running() as own:
                status = 0 if echoes(own) else 4
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    running.load("echo")
    print(echoes(running))
"""


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_are_refused_at_once_in_the_child() -> None:
    program = PROGRAM + "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\nprint('refused')\n"
    assert run(program) == "refused\n"


def test_a_child_that_leaves_the_context_leaves_the_functions_folder() -> None:
    head = PROGRAM[: PROGRAM.index("def refused")]
    assert run(head + PARENT) == "6.0\n"


@pytest.mark.slow
def test_a_child_makes_a_server_of_its_own(tmp_path: Path) -> None:
    isolated(tmp_path, "echo", ECHO)
    assert run(BOTH, str(tmp_path)) == "0\nTrue\n"
