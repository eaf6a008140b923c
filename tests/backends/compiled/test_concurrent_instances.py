"""What instances of a compiled backend do at the same time, through a real server and a backend in C: its execution policy.

The GPUs are those of the fake driver, which nothing here computes on: what matters is where the instances are.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import TEXT
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, needs_fake_gpu]

BOTH = "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ] "
CPU = "instance_group [ { count: 2 kind: KIND_CPU } ] "
LIMIT = 'parameters { key: "EXECUTE_TIMEOUT_SECONDS" value: { string_value: "4" } } '
BLOCKING = TEXT.replace('"probe"', '"blocking"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def both(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --backend-directory with the library as `blocking`, which blocks devices, and as `probe`, which does not."""
    backends = tmp_path_factory.mktemp("backends")
    for name in ("probe", "blocking"):
        (backends / name).mkdir()
        shutil.copy(probe, backends / name / f"libtriton_{name}.so")
    return backends


@pytest.fixture(scope="module")
def server(both: Path, folder: Path) -> Iterator[ServerProcess]:
    """A server with two GPUs."""
    write_model(folder, "shared", BLOCKING + BOTH)
    write_model(folder, "crowd", BLOCKING + BOTH.replace("2", "7", 1).replace("0, 1", "0") + LIMIT)
    write_model(folder, "sequences", BLOCKING + BOTH.replace("0, 1", "0") + "sequence_batching { }")
    write_model(folder, "others", TEXT + BOTH.replace("0, 1", "0"))
    write_model(folder, "processor", BLOCKING + CPU)
    slow = 'parameters { key: "INITIALIZE_TIMEOUT_SECONDS" value: { string_value: "4" } }'
    write_model(folder, "loads in line", BLOCKING + CPU.replace("2", "5") + slow)
    write_model(folder, "loads at once", TEXT + CPU)
    with FakeGpu(devices=2) as gpu:
        made = ServerProcess(folder, f"--backend-directory={both}", env=gpu.env)
        yield made
        made.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.grpc) as made:
        yield made


def sent(client: Any, model: str, what: str, count: int) -> list[Future[str]]:
    """Requests at the same time; each is of a sequence of its own, where the model has sequences."""
    tensor = grpc.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.int32))

    def infer(number: int) -> str:
        of = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        found = client.infer(model, [tensor], parameters={"do": what}, **(of if model == "sequences" else {}))
        return str(found.as_numpy("TEXT")[0, 0].decode())

    with_threads = ThreadPoolExecutor(count)
    made = [with_threads.submit(infer, number + 1) for number in range(count)]
    with_threads.shutdown(wait=False)
    return made


def together(client: Any, model: str, what: str, count: int) -> list[str]:
    return [each.result() for each in sent(client, model, what, count)]


def until_all_had_some(client: Any, model: str, count: int, instances: int) -> Counter[str]:
    """What was answered to so many requests at a time, once each instance has had one: there are more than one only where
    they come faster than they are executed."""
    found: Counter[str] = Counter()

    def all_had_some() -> bool:
        found.update(together(client, model, "hold 5", count))
        return len(found) >= instances

    until(all_had_some, found)
    return found


def test_of_instances_on_a_gpu_one_executes_at_a_time(client: Any) -> None:
    found = until_all_had_some(client, "shared", 48, 4)
    assert all(text.endswith(" alone") and " not " not in text for text in found), found


def test_instances_on_two_gpus_execute_at_the_same_time(client: Any) -> None:
    assert together(client, "shared", "meet", 2) == ["met", "met"]


@pytest.mark.parametrize("model", ["others", "processor", "sequences"])
def test_where_devices_are_not_blocked_all_execute_at_the_same_time(client: Any, model: str) -> None:
    assert together(client, model, "meet", 2) == ["met", "met"]


def test_time_that_an_instance_waits_does_not_count_as_its_execution(client: Any) -> None:
    """Of seven that take 0.8 s each, the last is answered after 5.6 s, with a limit of 4 s."""
    assert len(together(client, "crowd", "hold 800", 7)) == 7


def test_who_waits_goes_on_when_the_process_that_it_waits_for_crashes(client: Any, folder: Path) -> None:
    (crashing,) = sent(client, "shared", "hold 0", 1)
    until(lambda: len(list((folder / "shared").glob("crashes.*"))) == 1)
    device = next((folder / "shared").glob("crashes.*")).suffix
    waiting = sent(client, "shared", "hold 1", 3)
    (folder / "shared" / f"go{device}").touch()
    with pytest.raises(InferenceServerException, match="SIGABRT"):
        crashing.result()
    assert all(each.result().endswith(" alone") for each in waiting)


def test_instances_load_one_after_the_other_unless_the_backend_says_otherwise(server: ServerProcess) -> None:
    """Each of five takes a second, and has four for itself."""
    loaded = Counter(re.findall(r"probe: loads (.*)", server.log()))
    assert loaded == {"alone": 5, "together": 2}


@pytest.mark.parametrize("flags", [[], ["--rate-limit=execution_count", "--rate-limit-resource=lanes:4"]])
def test_with_the_dynamic_batcher_and_the_rate_limiter_it_is_the_same(
    both: Path, tmp_path: Path, flags: list[str]
) -> None:
    config = BLOCKING.replace("max_batch_size: 8", "max_batch_size: 1") + "dynamic_batching { } "
    config += 'instance_group [ { count: 2 kind: KIND_GPU rate_limiter { resources [ { name: "lanes" count: 1 } ] } } ] '
    config += 'model_warmup { name: "first" batch_size: 1 inputs { key: "IN" '
    config += "value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } }"
    write_model(tmp_path, "batched", config)
    with FakeGpu() as gpu:
        server = ServerProcess(tmp_path, f"--backend-directory={both}", *flags, env=gpu.env)
        with grpc.InferenceServerClient(server.grpc) as client:
            found = until_all_had_some(client, "batched", 16, 2)
        server.stop()
    assert len(found) == 2 and all(" not " not in text for text in found), found
