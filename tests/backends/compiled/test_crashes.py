"""A backend that crashes, leaves or hangs costs the requests that it was executing, and nobody else."""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import ONE, TEXT, asked, numbers
from tests.support.repository import write_model
from tests.support.sanitizer import SANITIZED
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CRASHES = int(os.environ.get("NEPTRIO_CRASHES", "20"))  # under load; `make soak` injects 1,000
HOW = {
    "segfault": r"killed by signal 11 \(SIGSEGV\)",
    "abort": r"killed by signal 6 \(SIGABRT\)",
    "exit": r"exited with status 3",
    "hang": r"EXECUTE_TIMEOUT_SECONDS",
    "follow": r"killed by signal 11 \(SIGSEGV\)",  # a handle is no address
}
if not SANITIZED:  # who would report it
    HOW["tear the heap"] = r"killed by signal 6 \(SIGABRT\)"
ENDS = [how for how in HOW if how != "hang"]  # which takes as long as its time limit


@pytest.fixture(scope="module")
def server(backends: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    limit = 'parameters { key: "EXECUTE_TIMEOUT_SECONDS" value: { string_value: "1" } }'
    write_model(folder, "probe", TEXT + ONE + limit)
    for name in ("other", "second"):
        write_model(folder, name, TEXT + ONE)
    made = ServerProcess(folder, f"--backend-directory={backends}")
    yield made
    made.stop()


@pytest.mark.parametrize("how", HOW)
def test_a_crash_costs_the_request_that_it_met_and_says_why(server: ServerProcess, how: str) -> None:
    with http.InferenceServerClient(server.http, concurrency=2) as client:
        until(lambda: client.is_model_ready("probe"), server.log)
        with pytest.raises(InferenceServerException) as failed:
            asked(client, f"crash {how}")
        assert re.search(HOW[how], failed.value.message()), failed.value.message()
        if how != "hang":  # there the reason is the time that it took
            assert f"probe: about to {how}" in failed.value.message(), "its last lines"
        assert client.infer("other", [numbers(3)]).as_numpy("OUT").tolist() == [[3]]
        until(lambda: client.is_model_ready("probe"), server.log)
        assert client.infer("probe", [numbers(4)]).as_numpy("OUT").tolist() == [[4]]


class Load:
    """Clients that ask a model for numbers without end, and note each answer that is not right."""

    def __init__(self, address: str, model: str, clients: int) -> None:
        self.wrong: list[str] = []
        self.served = 0
        self._address, self._model = address, model
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, value: int) -> None:
        with http.InferenceServerClient(self._address) as client:
            while not self._ends.is_set():
                try:
                    found = client.infer(self._model, [numbers(value)]).as_numpy("OUT").tolist()
                    if found != [[value]]:
                        self.wrong.append(f"{found} for {value}")
                    self.served += 1
                except InferenceServerException as error:
                    self.wrong.append(error.message())
                value += 1

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def crash(server: ServerProcess, model: str, count: int, seconds: list[float]) -> None:
    """Has a model crash so often, each time by a process that has answered; notes how long nothing was answered after that."""
    with http.InferenceServerClient(server.http) as client:
        for i in range(count):
            how = ENDS[i % len(ENDS)]
            with pytest.raises(InferenceServerException) as failed:
                asked(client, f"crash {how}", model)
            began = time.monotonic()
            assert re.search(HOW[how], failed.value.message()), failed.value.message()
            assert f"probe: about to {how}" in failed.value.message(), "its last lines"
            assert client.infer(model, [numbers(4)]).as_numpy("OUT").tolist() == [[4]], server.log()
            seconds.append(time.monotonic() - began)


def test_crashes_under_load_lose_no_other_request(server: ServerProcess) -> None:
    """Each crash fails the one request that asked for it: no other model's, and none that waits behind it or comes meanwhile,
    which the next process executes. That is started at once, as the one before had answered something."""
    loads = [
        Load(server.http, model, clients) for model, clients in (("other", 1), ("probe", 2), ("second", 2))
    ]
    seconds: list[float] = []
    try:
        with ThreadPoolExecutor() as pool:
            crashing = [
                pool.submit(crash, server, model, CRASHES // 2, seconds) for model in ("probe", "second")
            ]
            for one in crashing:
                one.result()
    finally:
        for load in loads:
            load.end()
    for load in loads:
        assert not load.wrong and load.served > CRASHES // 2
    print(
        f"{len(seconds)} crashes, {sum(load.served for load in loads)} requests answered; served again after "
        f"{statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s"
    )
    assert statistics.median(seconds) < 1 or SANITIZED
