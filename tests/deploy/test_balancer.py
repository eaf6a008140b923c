"""deploy/balancer/nginx.conf with a real nginx, over REST and gRPC: it keeps sequences on their server, and clients do not
notice when a server is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import sequence_config
from tests.support.control import infer
from tests.support.held_port import held_port
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
CONF = Path(__file__).parents[2] / "deploy" / "balancer" / "nginx.conf"
SEQUENCES = range(1, 25)
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "sum", sequence_config("oldest { max_candidate_sequences: 64 }", 4))
    with ServerProcess(repository) as first, ServerProcess(repository) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def balancer(
    servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    with balanced(servers, tmp_path_factory.mktemp("nginx")) as addresses:
        yield addresses


@contextlib.contextmanager
def balanced(servers: list[ServerProcess], folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of nginx for REST and gRPC, with the file's servers and ports replaced and nothing else."""
    with held_port() as http, held_port() as grpc, nginx(servers, folder, http, grpc):
        yield f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"


@contextlib.contextmanager
def nginx(servers: list[ServerProcess], folder: Path, http: int, grpc: int) -> Iterator[None]:
    text = CONF.read_text()
    for old, new in (
        ("10.0.0.1:8000", servers[0].http),
        ("10.0.0.2:8000", servers[1].http),
        ("10.0.0.1:8001", servers[0].grpc),
        ("10.0.0.2:8001", servers[1].grpc),
        ("listen 8000;", f"listen 127.0.0.1:{http};"),
        ("listen 8001 http2;", f"listen 127.0.0.1:{grpc} http2;"),
        ("/run/nginx.pid", str(folder / "pid")),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(NGINX), "-c", folder / "nginx.conf", "-g", "daemon off; user root;" if os.getuid() == 0 else "daemon off;"],
            stderr=out,
        )  # fmt: skip
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", grpc), 1):
                return True
            return False

        until(answers, "nginx listens")
        yield
    finally:
        process.terminate()
        process.wait(60)


def add(client: Any, module: Any, sequence: int, header: bool, start: bool = False, end: bool = False) -> int:
    """One request that adds 1; the sum so far."""
    tensor = module.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
    answer = client.infer(
        "sum",
        [tensor],
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
        headers={"x-sequence-id": str(sequence)} if header else {},
    )
    return int(answer.as_numpy("OUTPUT").flat[0])


def run(client: Any, module: Any, header: bool) -> list[int]:
    """The last sums of all sequences, whose requests come in turns; 0 for one whose server did not know it."""
    sums = {}
    for step in range(4):
        for sequence in SEQUENCES:
            try:
                sums[sequence] = add(client, module, sequence, header, step == 0, step == 3)
            except InferenceServerException as error:
                assert "START" in str(error) or "correlation ID" in str(error), error
                sums[sequence] = 0
    return list(sums.values())


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["rest", "grpc"])
def test_sequences_stay_on_their_server(
    module: Any, balancer: tuple[str, str], servers: list[ServerProcess]
) -> None:
    before = [inferences(server) for server in servers]
    with module.InferenceServerClient(balancer[module is grpcclient]) as client:
        assert run(client, module, header=True) == [4] * len(SEQUENCES)
        assert all(inferences(s) > count for s, count in zip(servers, before, strict=True)), "both had some"
        # without the header requests go anywhere, and no sequence of four would survive that by chance 24 times
        assert run(client, module, header=False) != [4] * len(SEQUENCES)


def inferences(server: ServerProcess, model: str = "sum") -> int:
    with httpclient.InferenceServerClient(server.http) as client:
        return int(client.get_inference_statistics(model)["model_stats"][0]["inference_count"])


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["rest", "grpc"])
def test_a_server_that_is_stopped_costs_no_request(module: Any, tmp_path: Path) -> None:
    """As when a pod is replaced: SIGTERM while clients are at work, whose requests then go to the other server."""
    write_model(tmp_path / "models", "m", identity_config())
    flags = ("--exit-grace-secs=2",)
    with ServerProcess(tmp_path / "models", *flags) as old, ServerProcess(tmp_path / "models") as new:
        with balanced([old, new], tmp_path) as addresses:
            answered = [0] * 4
            stopped = threading.Event()
            problems: list[BaseException] = []

            def work(number: int) -> None:
                try:
                    with module.InferenceServerClient(addresses[module is grpcclient]) as client:
                        more = 50
                        while more:
                            infer(client)
                            answered[number] += 1
                            more -= stopped.is_set()
                except BaseException as error:
                    problems.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(len(answered))]
            for thread in threads:
                thread.start()
            try:
                until(lambda: problems or min(answered) > 50, "every client has been served")
                assert inferences(old, "m") > 0 < inferences(new, "m")
                assert old.stop() == 0
            finally:
                stopped.set()
                for thread in threads:
                    thread.join(60)
            assert problems == []
            assert inferences(new, "m") >= 50 * len(answered)
