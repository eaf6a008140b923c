"""Which work of a GPU is under way together, told by the fake driver's journal: the order of launches and waits, and the
streams of copies and kernels. `hold` keeps kernels from beginning, so what is launched meanwhile is launched ahead."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add, add_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until

pytestmark = needs_fake_gpu

GROUP = " instance_group { kind: KIND_GPU }"
Line = tuple[str, ...]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path, "add", add_config(GROUP), {"1/model.cu": ADD})
    return tmp_path


def places(journal: list[Line], call: str) -> list[int]:
    """The positions of a call's lines."""
    return [i for i, line in enumerate(journal) if line[0] == call]


def launched(gpu: FakeGpu, count: int) -> None:
    until(lambda: gpu["launches"] >= count, f"{count} launches")


def infer(client: Any, api: Any, array: np.ndarray) -> np.ndarray:
    """What the model `add` answers to an INT32 array of one row."""
    asked = api.InferInput("X", list(array.shape), "INT32")
    asked.set_data_from_numpy(array)
    found: np.ndarray = client.infer("add", [asked]).as_numpy("Y")
    return found


# ---------------------------------------------------------------- batches under way


def test_three_batches_are_under_way_and_the_next_is_launched_before_the_last_is_waited_for(
    repository: Path,
) -> None:
    with FakeGpu(journal=1, hold=1) as gpu:
        with ServerProcess(repository, env=gpu.env) as server, ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(add, server, "add", 10 * i) for i in range(6)]
            launched(gpu, 3)
            assert not places(gpu.journal(), "ended")
            gpu["hold"] = 0
            assert [a.result(60) for a in answers] == [(200, [10 * i + 1]) for i in range(6)]
        journal = gpu.journal()
        launches, ends = places(journal, "launch"), places(journal, "ended")
        assert len(launches) == len(ends) == 6
        assert launches[2] < ends[0] < launches[3], "three, and no more"
        for i in range(3, 6):
            assert ends[i - 3] < launches[i], "a slot is free again only after its run was waited for"
        assert gpu.live() == {}


def test_copies_and_kernels_have_streams_of_their_own_with_events_between(repository: Path) -> None:
    with FakeGpu(journal=1, hold=1) as gpu:
        with ServerProcess(repository, env=gpu.env) as server, ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(add, server, "add", i) for i in range(3)]
            launched(gpu, 3)
            gpu["hold"] = 0
            assert {a.result(60)[0] for a in answers} == {200}
        journal = gpu.journal()
        third = journal[places(journal, "launch")[1] + 1 :]
        third = third[places(third, "htod")[0] :]
        inward = third[0][1]
        compute = third[places(third, "launch")[0]][1]
        outward = third[places(third, "dtoh")[0]][1]
        assert len({inward, compute, outward}) == 3
        before, after = third[: places(third, "launch")[0]], third[places(third, "launch")[0] :]
        after = after[: places(after, "dtoh")[0]]
        for lines, source, target in ((before, inward, compute), (after, compute, outward)):
            waits = [line for line in lines if line[:2] == ("wait", target)]
            assert waits, "the target's work begins after the source's"
            assert ("record", source, waits[0][2]) in lines[: lines.index(waits[0])]


@pytest.mark.slow
def test_while_nothing_else_is_under_way_one_stream_does_everything_and_then_one_graph(
    repository: Path,
) -> None:
    with FakeGpu(journal=1) as gpu, ServerProcess(repository, env=gpu.env) as server:
        assert add(server, "add", 1) == (200, [2])
        journal = [line for line in gpu.journal() if line[0] not in ("init", "pin")]
        assert not places(journal, "wait") and len({line[1] for line in journal}) == 1
        for i in range(6):
            assert add(server, "add", i) == (200, [i + 1])
        assert gpu["elapsed"] == 3 * 4, "the first four are measured"
        known = len(gpu.journal())
        assert add(server, "add", 7) == (200, [8])
        calls = [line[0] for line in gpu.journal()[known:]]
        assert calls == ["graph", "record", "ended"], "copies and kernels are in the graph"


@pytest.mark.slow
def test_a_recording_that_others_end_costs_no_request(tmp_path: Path) -> None:
    """The driver ends it when a library in the process waits for the whole device. It is tried again."""
    write_model(tmp_path, "add", add_config(GROUP), {"1/model.cu": ADD})
    twice = kernel_config(
        8,
        tensors("input", ("X", "INT32", "-1")),
        tensors("output", ("Y", "INT32", "-1")),
        parameter(
            "kernels",
            "add<<<ceil_div(X.size, 64), 64>>>(X, T, X.size); add<<<ceil_div(X.size, 64), 64>>>(T, Y, X.size)",
        ),
        parameter("scratch", "T = INT32[batch, X.shape[1]]"),
        parameter("shapes", "Y = [batch, X.shape[1]]"),
    )
    write_model(tmp_path, "twice", twice + GROUP, {"1/model.cu": ADD})
    large = list(range(50_000))
    with FakeGpu() as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            for model, values, more in (("add", [5], 1), ("twice", large, 2)):
                before = gpu["graph_launches"]
                gpu["spoil"] = 1
                for _ in range(16):
                    assert add(server, model, *values) == (200, [v + more for v in values])
                assert gpu["spoil"] == 0 and gpu["graph_launches"] > before
        assert gpu.live() == {}


@pytest.mark.slow
def test_recording_is_given_up_when_it_never_succeeds(repository: Path) -> None:
    with FakeGpu() as gpu:
        with ServerProcess(repository, env=gpu.env) as server:
            ended = 0
            for i in range(40):
                gpu["spoil"] = 1
                assert add(server, "add", i) == (200, [i + 1])
                ended += gpu["spoil"] == 0
            assert ended == 3 and gpu["graph_launches"] == 0
        assert gpu.live() == {}


@pytest.mark.slow
def test_other_shapes_have_graphs_of_their_own(repository: Path) -> None:
    with FakeGpu(journal=1) as gpu, ServerProcess(repository, env=gpu.env) as server:
        for length in (1, 2, 1, 2):
            for i in range(8):
                assert add(server, "add", *[i] * length) == (200, [i + 1] * length)
        assert gpu["graph_launches"] == 2 * (2 + 8)


@pytest.mark.slow
def test_connections_are_set_before_the_driver_starts(repository: Path) -> None:
    for given, read in (({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "4")):
        with FakeGpu(journal=1) as gpu:
            env = {k: v for k, v in gpu.env.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"} | given
            with ServerProcess(repository, env=env) as server:
                assert add(server, "add", 1) == (200, [2])
            assert [line for line in gpu.journal() if line[0] == "init"] == [("init", read)]


# ---------------------------------------------------------------- errors with others under way


@pytest.mark.slow
def test_a_launch_that_fails_leaves_the_batches_before_and_after_it_alone(repository: Path) -> None:
    with FakeGpu(fail_launch_with=701, hold=1) as gpu:
        with ServerProcess(repository, env=gpu.env) as server, ThreadPoolExecutor(3) as pool:
            first = pool.submit(add, server, "add", 1)
            launched(gpu, 1)
            gpu["fail_launch"] = 1
            second = pool.submit(add, server, "add", 2)
            until(lambda: gpu["fail_launch"] == 0, "the launch fails")
            third = pool.submit(add, server, "add", 3)
            launched(gpu, 2)
            assert not first.done() and not second.done(), "it is answered when nothing uses its memory"
            gpu["hold"] = 0
            assert first.result(60) == (200, [2])
            failed = "model 'add': CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES while launching a kernel"
            assert second.result(60) == (500, failed)
            assert third.result(60) == (200, [4])
            assert add(server, "add", 5) == (200, [6])
        assert gpu.live() == {}


@pytest.mark.slow
def test_an_error_of_one_batch_that_ends_the_context_fails_those_under_way(repository: Path) -> None:
    with FakeGpu(fault_kernel_with=700, hold=1) as gpu:
        with ServerProcess(repository, env=gpu.env) as server, ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(add, server, "add", i) for i in range(3)]
            launched(gpu, 3)
            gpu["fault_kernel"] = 1
            gpu["hold"] = 0
            for answer in answers:
                status, text = answer.result(60)
                assert status == 500 and "CUDA_ERROR_ILLEGAL_ADDRESS while executing" in text


# ---------------------------------------------------------------- large batches

CHUNKS = """
import numpy as np
from benchmarks.gpu import Runner, compare, stream_case
runner = Runner(stream_case())
sent = [{"X": np.ones((1, 4), np.float32)}, {"X": np.full((1, 4 << 20), 3, np.float32)}]
batches = [runner.prepare(a) for a in sent]
for batch in batches:
    runner.mailbox.submit(batch)
runner.mailbox.close()
runner.mailbox.run()
for arrays, batch in zip(sent, batches):
    compare(runner.case, arrays, runner.results(batch)[0])
runner.close()
"""


@pytest.mark.slow
def test_a_batch_that_has_ended_is_not_delayed_by_staging_the_next_one() -> None:
    """With work that runs while it is asked for, the small batch ends while the large one's inputs are gathered."""
    with FakeGpu(journal=1, main_thread=1) as gpu:
        subprocess.run([sys.executable, "-c", CHUNKS], env=gpu.env, check=True)
        journal = gpu.journal()
        copies = places(journal, "htod")
        sizes = [int(journal[i][2]) for i in copies]
        assert sizes[0] < 1024 and sum(sizes[1:]) == 16 << 20
        assert len(sizes) == 1 + 32 and max(sizes) == 1 << 19, "the host gathers and sends in turns"
        assert copies[1] < places(journal, "ended")[0] < copies[-1]


@pytest.mark.slow
def test_outputs_that_could_not_be_pinned_do_not_keep_the_next_batch_from_being_launched(
    repository: Path,
) -> None:
    """The driver's copy to ordinary memory returns when it is done, so it is called when the kernels have ended."""
    with FakeGpu(journal=1, fail_pinned=2) as gpu:
        with ServerProcess(repository, env=gpu.env) as server, ThreadPoolExecutor(2) as pool:
            gpu["hold"] = 1
            large = np.arange(100_000, dtype=np.int32)
            first = pool.submit(add, server, "add", *large.tolist())
            launched(gpu, 1)
            second = pool.submit(add, server, "add", 1)
            launched(gpu, 2)
            gpu["hold"] = 0
            assert first.result(60) == (200, (large + 1).tolist()) and second.result(60) == (200, [2])
        late = [line for line in gpu.journal() if line[0] == "dtoh" and line[-1] == "pageable"]
        assert [int(line[2]) for line in late] == [400_128]


@pytest.mark.slow
@without_front_ends
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_large_bodies_are_received_into_pinned_memory(repository: Path, protocol: str) -> None:
    """The device fetches the tensor from where it was received: one copy of all of it. The driver locks the memory
    while the body arrives, and the first time it may come later."""
    array = np.arange(1 << 20, dtype=np.int32).reshape(1, -1)
    api = httpclient if protocol == "http" else grpcclient
    with FakeGpu(journal=1) as gpu:
        with ServerProcess(repository, env=gpu.env) as server:
            address = server.http if protocol == "http" else server.grpc
            with api.InferenceServerClient(address) as client:

                def direct() -> bool:
                    np.testing.assert_array_equal(infer(client, api, array), array + 1)
                    return any(
                        line[0] == "htod" and line[2:] == (str(4 << 20), "pinned") for line in gpu.journal()
                    )

                until(direct, "a copy of the whole tensor")
        assert gpu.live() == {}


@pytest.mark.slow
def test_bodies_take_at_most_half_of_the_pinned_memory(repository: Path) -> None:
    """What does not fit there is received as usual, and gathered by the host."""
    array = np.arange(1 << 20, dtype=np.int32).reshape(1, -1)
    with FakeGpu(journal=1) as gpu:
        flags = ("--pinned-memory-pool-byte-size", str(7 << 20))
        with ServerProcess(repository, *flags, env=gpu.env) as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for _ in range(3):
                    np.testing.assert_array_equal(infer(client, httpclient, array), array + 1)
        assert {line[2] for line in gpu.journal() if line[0] == "htod"} == {str(1 << 19)}
        assert gpu.live() == {}
