"""The loop's thread asks for a short time slice; what it starts has ordinary ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from neptrio.loop.time_slice import SHORT_NS, SWITCH_SECONDS, ask_for_a_short_one, slice_ns
from tests.backends.python.models import isolated, python_model
from tests.support.server import ServerProcess, is_front_end

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def in_a_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def granted() -> bool:
    """Whether this kernel lets a thread choose its slice."""
    answers: list[bool] = []
    in_a_thread(lambda: answers.append(ask_for_a_short_one()))
    return answers[0]


needs_slices = pytest.mark.skipif(not granted(), reason="the kernel does not let threads choose (Linux 6.12)")


@needs_slices
def test_a_thread_and_what_it_starts() -> None:
    ordinary = slice_ns()
    assert ordinary > SHORT_NS

    def work() -> None:
        assert ask_for_a_short_one()
        assert slice_ns() == SHORT_NS
        below: list[int] = []
        in_a_thread(lambda: below.append(slice_ns()))
        assert below == [ordinary]

    in_a_thread(work)
    assert slice_ns() == ordinary


@needs_slices
def test_who_chose_a_policy_keeps_it() -> None:
    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        assert not ask_for_a_short_one()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_a_thread(work)


@needs_slices
def test_a_server_and_its_models(tmp_path: Path) -> None:
    ordinary = slice_ns()
    python_model(tmp_path, "echo", ECHO)
    with ServerProcess(tmp_path) as server:
        pid = server.process.pid
        assert slice_ns(pid) == SHORT_NS
        others = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
            if not is_front_end(int(child))  # whose loops have short slices
        ]
        assert children, "the model has a process"
        assert {slice_ns(thread) for thread in (*others, *children)} == {ordinary}


TELLS = """
import sys

class TritonPythonModel:
    def initialize(self, args):
        print(f"{args['model_name']} switches after {sys.getswitchinterval()} s", file=sys.stderr, flush=True)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_who_shares_the_interpreter_lets_go_of_it_soon(tmp_path: Path) -> None:
    isolated(tmp_path, "inside", TELLS, way="none")
    isolated(tmp_path, "outside", TELLS, way="process")
    with ServerProcess(tmp_path) as server:
        server.until_logged(f"inside switches after {SWITCH_SECONDS} s")
        server.until_logged("outside switches after 0.005 s")
