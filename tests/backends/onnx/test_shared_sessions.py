"""Instances of an ONNX model that run one session together (config/session_sharing.py)."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from onnx import helper, numpy_helper
from tritonclient.utils import InferenceServerException

from neptrio.backends.onnx.shared_session import SharedSession
from neptrio.config import session_sharing
from tests.support import onnx_models
from tests.support.memory import anonymous
from tests.support.repository import write_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.slow_models import parameter

MIB = 1 << 20
WEIGHTS = 16 * MIB


class Session:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_who_comes_first_makes_it_and_who_leaves_last_closes_it() -> None:
    made: list[Session] = []

    def make() -> Session:
        made.append(Session())
        return made[-1]

    shared = SharedSession(make)
    first, second = shared.acquire(), shared.acquire()
    assert first is second and len(made) == 1
    shared.release()
    assert not first.closed
    shared.release()
    assert first.closed
    assert shared.acquire() is made[1], "after that it is made anew"


def test_a_session_that_cannot_be_made_is_tried_again_by_the_next() -> None:
    tries: list[int] = []

    def make() -> Session:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return Session()

    shared = SharedSession(make)
    with pytest.raises(ValueError, match="not yet"):
        shared.acquire()
    found = shared.acquire()
    shared.release()
    assert found.closed


@pytest.mark.parametrize(
    ("settings", "own_operators", "expected"),
    [
        ({}, False, True),
        ({"intra_op_thread_count": "1"}, False, True),
        ({"intra_op_thread_count": "4"}, False, False),
        ({"session.inter_op_num_threads": "2"}, False, False),
        ({"intra_op_thread_count": "4", "share_session": "1"}, False, True),
        ({"share_session": "0"}, False, False),
        ({}, True, False),
        ({"share_session": "1"}, True, True),
        ({"session.set_denormal_as_zero": "1"}, False, False),
        ({"session_api": "python"}, False, False),
    ],
)
def test_what_is_shared(settings: dict[str, str], own_operators: bool, expected: bool) -> None:
    assert session_sharing.shared(settings, own_operators) is expected


def config(count: int, parameters: str = "") -> str:
    return f'backend: "onnxruntime" max_batch_size: 4 instance_group {{ kind: KIND_CPU count: {count} }} {parameters}'


def weighty() -> bytes:
    """Y = X * A * B, with A * B = 4: two layers of weights."""
    rows = WEIGHTS // 2 // 4 // 4
    first, second = np.full((4, rows), 0.5, np.float32), np.full((rows, 4), 2 / rows, np.float32)
    return onnx_models.model(
        [helper.make_node("MatMul", ["X", "A"], ["H"]), helper.make_node("MatMul", ["H", "B"], ["Y"])],
        [onnx_models.tensor("X", "FP32", ("N", 4))],
        [onnx_models.tensor("Y", "FP32", ("N", 4))],
        [numpy_helper.from_array(first, "A"), numpy_helper.from_array(second, "B")],
    )


def infer(client: grpcclient.InferenceServerClient, name: str, value: float) -> float:
    given = grpcclient.InferInput("X", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), value, np.float32))
    found: float = client.infer(name, [given]).as_numpy("Y")[0, 3]
    return found


@no_memory_figures
def test_four_instances_take_the_memory_of_one(tmp_path: Path) -> None:
    write_model(tmp_path, "warm", config(1), {"1/model.onnx": weighty()})
    write_model(tmp_path, "together", config(4), {"1/model.onnx": weighty()})
    write_model(tmp_path, "apart", config(4, parameter("share_session", "0")), {"1/model.onnx": weighty()})
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=warm") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        taken = {}
        for name in ("together", "apart"):
            before = anonymous(server.process.pid)
            client.load_model(name)
            taken[name] = anonymous(server.process.pid) - before
            assert infer(client, name, 3.0) == pytest.approx(12.0)
        assert 2 * taken["together"] < taken["apart"]


def test_instances_run_it_at_the_same_time_and_leave_it_to_the_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", config(4), {"1/model.onnx": weighty()})
    wrong: list[float] = []
    stopping = threading.Event()

    def ask(value: float) -> None:
        with grpcclient.InferenceServerClient(server.grpc) as own:
            while not stopping.is_set():
                found = infer(own, "m", value)
                if found != pytest.approx(4 * value):
                    wrong.append(found)

    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        threads = [threading.Thread(target=ask, args=(float(number),)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        try:
            for count in (1, 3, 2):  # a change in place: instances come and go while the others run
                (folder / "config.pbtxt").write_text(config(count))
                client.load_model("m")
                assert infer(client, "m", 2.5) == pytest.approx(10.0)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        client.unload_model("m")
        client.load_model("m")
        assert infer(client, "m", 2.5) == pytest.approx(10.0)
    assert not wrong


def test_a_setting_of_one_thread_cannot_be_shared(tmp_path: Path) -> None:
    parameters = parameter("share_session", "1") + parameter("session.set_denormal_as_zero", "1")
    write_model(tmp_path, "m", config(2, parameters), {"1/model.onnx": weighty()})
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        pytest.raises(
            InferenceServerException,
            match=r"share_session 1, which is not possible with session\.set_denormal_as_zero 1",
        ),
    ):
        client.load_model("m")
