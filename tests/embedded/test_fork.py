"""A process that forks while its program has a server: the child has the objects, and not the server's thread."""

from __future__ import annotations

import subprocess
import sys

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


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_are_refused_at_once_in_the_child() -> None:
    program = PROGRAM + "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\nprint('refused')\n"
    assert run(program) == "refused\n"


def test_a_child_that_leaves_the_context_leaves_the_functions_folder() -> None:
    head = PROGRAM[: PROGRAM.index("def refused")]
    assert run(head + PARENT) == "6.0\n"
