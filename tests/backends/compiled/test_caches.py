"""A response cache of Triton's interface, built of cache_probe.c: served, and whatever it does, no answer but the right one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from tests.support.metrics import scrape, value
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ROWS = 'input [ {{ name: "INPUT{0}" data_type: {1} dims: [ -1 ] }} ] output [ {{ name: "OUTPUT{0}" data_type: {1} dims: [ -1 ] }} ] '
CONFIG = (
    'backend: "identity" max_batch_size: 8 response_cache { enable: true } '
    + ROWS.format(0, "TYPE_INT32")
    + ROWS.format(1, "TYPE_STRING")
)


class Probed:
    """A server whose cache is the probe, and what it has done."""

    def __init__(self, folder: Path, caches: Path, *settings: str, flags: tuple[str, ...] = ()) -> None:
        self.control = folder / "control"
        self.mode("normal")
        os.mkfifo(folder / "go")
        self.go = os.open(folder / "go", os.O_RDWR)
        write_model(folder / "models", "cached", CONFIG)
        # several flags, as Triton's are written
        said = [
            f"--cache-config=probe,{text}"
            for text in (f"control={self.control}", f"go={folder}/go", *settings)
        ]
        self.server = ServerProcess(folder / "models", f"--cache-directory={caches}", *said, *flags)

    def mode(self, name: str) -> None:
        self.control.write_text(name)

    def close(self) -> None:
        self.server.stop()
        os.close(self.go)

    def stats(self) -> dict[str, int]:
        with http.InferenceServerClient(self.server.http) as client:
            found = client.get_inference_statistics("cached")["model_stats"][0]["inference_stats"]
        return {name: int(found[name]["count"]) for name in ("success", "fail", "cache_hit", "cache_miss")}

    def asked(self, number: int, outputs: tuple[str, ...] = ("OUTPUT0", "OUTPUT1")) -> bool:
        """Asks the model, checks the answer, and says whether it came out of the cache."""
        before = self.stats()
        numbers = http.InferInput("INPUT0", [2, 3], "INT32")
        numbers.set_data_from_numpy(np.full((2, 3), number, np.int32))
        texts = http.InferInput("INPUT1", [2, 1], "BYTES")
        texts.set_data_from_numpy(np.array([["a"], [f"text {number}"]], object))
        with http.InferenceServerClient(self.server.http) as client:
            result = client.infer(
                "cached", [numbers, texts], outputs=[http.InferRequestedOutput(name) for name in outputs]
            )
        assert {row["name"] for row in result.get_response()["outputs"]} == set(outputs)
        if "OUTPUT0" in outputs:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((2, 3), number))
        if "OUTPUT1" in outputs:
            assert result.as_numpy("OUTPUT1").tolist() == [[b"a"], [f"text {number}".encode()]]
        after = self.stats()
        hit = after["cache_hit"] - before["cache_hit"]
        assert after["success"] == before["success"] + 1 and after["fail"] == before["fail"]
        assert after["cache_miss"] - before["cache_miss"] == 1 - hit
        return bool(hit)

    def stored(self, number: int) -> None:
        """Asks until the answer is stored, which nobody waits for."""
        until(lambda: self.asked(number), self.server.log)

    def process(self) -> int:
        """The last process that was ready."""
        return int(re.findall(r"cache 'probe' is ready \(.*, process (\d+)\)", self.server.log())[-1])


@pytest.fixture(scope="module")
def probed(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    made = Probed(
        tmp_path_factory.mktemp("probed"), caches, "timeout_ms=30000", "restart_ms=30000", "more=a,b"
    )
    yield made
    made.close()


@pytest.fixture(autouse=True)
def normal(request: pytest.FixtureRequest) -> None:
    if "probed" in request.fixturenames:
        request.getfixturevalue("probed").mode("normal")


def test_it_is_a_cache_as_any_other(probed: Probed) -> None:
    assert not probed.asked(1)
    probed.stored(1)
    assert not probed.asked(1, ("OUTPUT1",)), "an answer to another question"
    until(lambda: probed.asked(1, ("OUTPUT1",)), probed.server.log)
    log = probed.server.log()
    assert '"more": "a,b"' in log and "timeout_ms" not in re.findall("begun with .*", log)[0]
    line = Path(f"/proc/{probed.process()}/cmdline").read_bytes()
    assert b"libtritoncache_probe" in line and b"control" not in line, "a setting may be a secret"
    assert re.search(r"W\d{4} .*probe: a warning of the cache's", log), "as the warning that it is"

    def counted() -> bool:
        return value(scrape(probed.server), "nv_cache_num_entries") == 2

    until(counted, probed.server.log)
    text, stats = scrape(probed.server), probed.stats()
    labels = {"model": "cached", "version": "1"}
    assert (
        value(text, "nv_cache_num_hits")
        == value(text, "nv_cache_num_hits_per_model", **labels)
        == stats["cache_hit"]
    )
    assert value(text, "nv_cache_num_misses") == stats["cache_miss"]
    assert value(text, "nv_cache_lookup_duration") > 0 and value(text, "nv_cache_insertion_duration") > 0


@pytest.mark.parametrize(
    "how", ["garbage", "flip", "short", "long", "huge", "twice", "claim", "swap", "fail"]
)
def test_what_was_not_stored_is_no_answer(probed: Probed, how: str) -> None:
    """Nor is what was stored for another question. The process goes on."""
    probed.stored(1)
    probed.stored(2)
    process = probed.process()
    probed.mode(how)
    assert not probed.asked(2)
    probed.mode("normal")
    assert probed.asked(2)
    assert probed.process() == process
    until(lambda: "cache 'probe': " in probed.server.log(), probed.server.log)


def test_handles_are_looked_up_and_not_trusted(probed: Probed) -> None:
    probed.asked(3)
    probed.mode("misuse")
    probed.asked(3)
    until(lambda: "misuse: 0 of what must be refused was taken" in probed.server.log(), probed.server.log)
    assert "was taken\n" not in probed.server.log().replace("must be refused was taken", "")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("segfault", "was killed by signal 11 .*about to crash"),
        ("exit", "exited with status 3"),
    ],
)
def test_a_crash_is_a_miss_and_the_process_is_started_again(probed: Probed, how: str, why: str) -> None:
    before = probed.process()
    probed.mode(how)
    assert not probed.asked(4)
    probed.mode("normal")
    until(lambda: probed.process() != before, probed.server.log)
    assert re.search(
        f"cache 'probe' has ended: its process {why}.*; it is started again in ", probed.server.log()
    )
    probed.stored(4)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("scribble", "it has sent a message of kind 1515870810"),
        ("unasked", "it has answered question 1073741824, which is not open"),
        ("flood", "it has sent a message of kind 3 and 1099511627776 bytes"),
    ],
)
def test_a_process_that_sends_what_cannot_be_is_ended(probed: Probed, how: str, why: str) -> None:
    before = probed.process()
    probed.mode(how)
    assert not probed.asked(5)
    probed.mode("normal")
    until(lambda: probed.process() != before, probed.server.log)
    assert f"cache 'probe' has ended: {why}" in probed.server.log()
    probed.stored(5)


def test_a_cache_that_is_slow_costs_its_time_once(caches: Path, tmp_path: Path) -> None:
    """While its answer is overdue it is not asked; a hung one is ended, and a new process is begun."""
    probed = Probed(tmp_path, caches, "timeout_ms=50", "restart_ms=60000")
    try:
        probed.stored(1)
        probed.mode("slow")
        assert not probed.asked(1)
        probed.mode("segfault")  # nobody asks it, so it does not crash
        assert not probed.asked(1) and not probed.asked(2)
        probed.mode("normal")
        os.write(probed.go, b"g")
        probed.stored(1)
        assert probed.server.log().count("cache 'probe' is ready") == 1
    finally:
        probed.close()
    assert "finalized the cache" in probed.server.log()


def test_a_cache_that_hangs_is_ended(caches: Path, tmp_path: Path) -> None:
    probed = Probed(tmp_path, caches, "timeout_ms=50", "restart_ms=300", "coalesce=true")
    try:
        probed.stored(1)
        probed.mode("hang")
        with grpc.InferenceServerClient(probed.server.grpc) as client:  # others are served meanwhile
            assert client.is_server_ready()
        assert not probed.asked(1)
        until(lambda: "has ended: it did not answer within 0.3 s" in probed.server.log(), probed.server.log)
        probed.mode("normal")
        probed.stored(1)
        probed.mode("hang")
        assert not probed.asked(1)
    finally:
        probed.close()  # while it hangs
    assert probed.server.process.returncode == 0


def test_a_namespace_is_shared_by_all_loads(caches: Path, tmp_path: Path) -> None:
    """And by servers, whose keys are made in the same way. Without one, a load finds only answers of its own."""
    for namespace in ("", "mine"):
        folder = tmp_path / f"of-{namespace}"
        folder.mkdir()
        settings = ["timeout_ms=30000", *([f"namespace={namespace}"] if namespace else [])]
        probed = Probed(
            folder, caches, *settings, flags=("--model-control-mode=explicit", "--load-model=cached")
        )
        try:
            probed.stored(1)
            with http.InferenceServerClient(probed.server.http) as client:
                client.unload_model("cached")
                until(lambda: not client.is_model_ready("cached"), probed.server.log)
                client.load_model("cached")
            assert probed.asked(1) == bool(namespace)
        finally:
            probed.close()


def test_a_start_that_waits_for_the_cache_can_be_interrupted(caches: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "control").write_text("stall")
    flags = [
        f"--model-repository={tmp_path}/models",
        f"--cache-directory={caches}",
        "--http-port=0",
        "--grpc-port=0",
    ]
    flags += ["--metrics-port=0", f"--cache-config=probe,control={tmp_path}/control"]
    with subprocess.Popen(
        [sys.executable, "-m", "neptrio", *flags], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        assert any("it stalls" in line for line in server.stderr), "it waits now"
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


REFUSED = r"cache 'probe' \(.*\) cannot be used: the setting 'control' says refuse"


@pytest.mark.parametrize(
    ("setting", "how", "why"),
    [
        (
            "redis,host=x",
            "",
            "--cache-config: there is no cache 'redis': looked for '.*/redis/libtritoncache_redis.so'",
        ),
        ("probe,control={control}", "refuse", REFUSED),
        ("probe,control={control}", "linger", REFUSED),
        (
            "probe,control={control}",
            "chatter",
            r"cache 'probe' \(.*\) cannot be used: it has sent a message of kind 3 before it was ready",
        ),
    ],
    ids=["unknown", "refuses", "refuses-and-stays", "speaks-too-soon"],
)
def test_a_start_without_the_cache_fails_and_says_why(
    caches: Path, tmp_path: Path, setting: str, how: str, why: str
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "control").write_text(how)
    flags = [
        f"--model-repository={tmp_path}/models",
        f"--cache-directory={caches}",
        "--http-port=0",
        "--grpc-port=0",
    ]
    flags += ["--metrics-port=0", f"--cache-config={setting.replace('{control}', str(tmp_path / 'control'))}"]
    done = subprocess.run(
        [sys.executable, "-m", "neptrio", *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert re.search(f"error: creating server: .*{why}", done.stderr), done.stderr
