"""A backend that crashes, leaves or hangs costs the requests that it was executing, and nobody else."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.test_served import ONE, TEXT, asked, numbers
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow
HOW = {
    "segfault": r"killed by signal 11 \(SIGSEGV\)",
    "abort": r"killed by signal 6 \(SIGABRT\)",
    "exit": r"exited with status 3",
    "hang": r"EXECUTE_TIMEOUT_SECONDS",
    "follow": r"killed by signal 11 \(SIGSEGV\)",  # a handle is no address
}


@pytest.fixture(scope="module")
def server(backends: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    limit = 'parameters { key: "EXECUTE_TIMEOUT_SECONDS" value: { string_value: "1" } }'
    write_model(folder, "probe", TEXT + ONE + limit)
    write_model(folder, "other", TEXT + ONE)
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


def test_crashes_under_load_lose_no_request_of_another_model(server: ServerProcess) -> None:
    """Each crash fails the one request that asked for it; what waits behind it is executed by the next process."""
    ends = threading.Event()
    wrong: list[Any] = []
    served = [0]

    def others() -> None:
        with http.InferenceServerClient(server.http) as client:
            while not ends.is_set():
                found = client.infer("other", [numbers(served[0])]).as_numpy("OUT")
                if not np.array_equal(found, [[served[0]]]):
                    wrong.append(found)
                served[0] += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        with http.InferenceServerClient(server.http, concurrency=8) as client:
            for how in ("segfault", "abort") * 3:
                until(lambda: client.is_model_ready("probe"), server.log)
                with pytest.raises(InferenceServerException, match="killed by signal"):
                    asked(client, f"crash {how}")
    finally:
        ends.set()
        thread.join()
    assert not wrong and served[0] > 20
