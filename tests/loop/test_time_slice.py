"""The loop's thread asks for a short time slice, a model that computes for long for a long one; what they start has ordinary ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio.loop.time_slice import SHORT_NS, SWITCH_SECONDS
from tests.backends.python.models import config, isolated, python_model
from tests.support.server import ServerProcess, is_front_end
from tests.support.waiting import until
from triton_python_backend_utils._process.time_slice import (
    LONG_NS,
    QUICK_BATCHES,
    SLICE_NS,
    ModelSlice,
    ask,
    slice_ns,
)

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
    in_a_thread(lambda: answers.append(ask(SHORT_NS)))
    return answers[0]


needs_slices = pytest.mark.skipif(not granted(), reason="the kernel does not let threads choose (Linux 6.12)")


@needs_slices
def test_a_thread_and_what_it_starts() -> None:
    ordinary = slice_ns()
    assert ordinary > SHORT_NS

    def work() -> None:
        assert ask(SHORT_NS)
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
        assert not ask(SHORT_NS)
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


class Kernel:
    """What a thread asks for, and its slice."""

    def __init__(self, grants: bool = True) -> None:
        self.grants = grants
        self.slice = 3_000_000
        self.asked: list[int] = []

    def ask(self, nanoseconds: int) -> bool:
        self.asked.append(nanoseconds)
        if self.grants:
            self.slice = nanoseconds or 3_000_000
        return self.grants

    def slice_ns(self) -> int:
        return self.slice


def batches(model: ModelSlice, *took_ns: int) -> None:
    """As the model's process does it behind each batch."""
    for took in took_ns:
        if took > model.watched:
            model.after(took)


def test_long_batches_ask_for_a_long_slice_and_quick_ones_give_it_back() -> None:
    kernel = Kernel()
    model = ModelSlice(kernel.ask, kernel.slice_ns)
    batches(model, *[LONG_NS] * 100)
    assert kernel.asked == []
    batches(model, LONG_NS + 1, 10 * LONG_NS)
    assert kernel.asked == [SLICE_NS]
    batches(model, *[0] * (QUICK_BATCHES - 1), LONG_NS + 1, *[0] * (QUICK_BATCHES - 1))
    assert kernel.asked == [SLICE_NS]
    batches(model, 0, 0, 0)
    assert kernel.asked == [SLICE_NS, 0]
    batches(model, LONG_NS + 1)
    assert kernel.asked == [SLICE_NS, 0, SLICE_NS]


def test_a_kernel_that_refuses_is_asked_once() -> None:
    kernel = Kernel(grants=False)
    batches(ModelSlice(kernel.ask, kernel.slice_ns), *[LONG_NS + 1] * 5, *[0] * QUICK_BATCHES, LONG_NS + 1)
    assert kernel.asked == [SLICE_NS]


def test_a_model_that_chose_a_slice_keeps_it() -> None:
    kernel = Kernel()
    model = ModelSlice(kernel.ask, kernel.slice_ns)
    kernel.slice = 7_000_000
    batches(model, *[LONG_NS + 1] * 5)
    assert kernel.asked == []
    kernel = Kernel()
    model = ModelSlice(kernel.ask, kernel.slice_ns)
    batches(model, LONG_NS + 1)
    kernel.slice = 7_000_000
    batches(model, *[0] * QUICK_BATCHES)
    assert kernel.asked == [SLICE_NS]


COMPUTES = f"""
import threading, time
import numpy as np
from triton_python_backend_utils._process.time_slice import slice_ns

class TritonPythonModel:
    def execute(self, requests):
        mine, below = slice_ns(), []
        thread = threading.Thread(target=lambda: below.append(slice_ns()))
        thread.start()
        thread.join()
        (asked,) = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        until = time.monotonic_ns() + int(asked) * {LONG_NS}  # not a float32: they are milliseconds apart
        while time.monotonic_ns() < until:
            pass
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([mine, *below]))])]
"""


@needs_slices
def test_a_model_that_computes_for_long(tmp_path: Path) -> None:
    ordinary = slice_ns()
    isolated(tmp_path, "computes", COMPUTES, config(outputs="OUT:TYPE_INT64:2"))
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:

        def slices(long: bool) -> list[int]:
            tensor = httpclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.array([2 if long else 0], np.float32))
            found: list[int] = client.infer("computes", [tensor]).as_numpy("OUT").tolist()
            return found

        assert slices(long=True) == [ordinary, ordinary]
        assert slices(long=False) == [SLICE_NS, ordinary]
        until(lambda: slices(long=False) == [ordinary, ordinary], server.log)


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
