"""Models in processes of their own, as they are by default: what they may do to the server, and what it gives them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.python import memory_group
from tests.backends.python.models import config, python_model
from tests.support.sanitizer import SANITIZED, no_memory_figures
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

# a model that does what its request's parameter says; OUT is what it found
MANY = """
import ctypes, json, os, re, resource, threading
from pathlib import Path
import numpy as np

def scribble(what):
    for line in open("/proc/self/maps"):
        if "neptrio-rings" in line:
            begin, end = (int(n, 16) for n in line.split()[0].split("-"))
            rings = 256 * 3 + (256 + 1024 + 1024) * 32
            area = (end - begin - rings) // 2
            if what == "rings":
                ctypes.memset(begin, 127, rings)
            elif what == "outputs":
                ctypes.memset(end - area, 255, 1 << 20)
            else:
                done = begin + 256 * 2 + (256 + 1024) * 32
                ctypes.memset(done + 256, 7, 1024 * 32)

def files():
    kept = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            kept[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return kept

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            asked = json.loads(request.parameters())
            how = asked.get("how", "")
            if how == "scribble":
                scribble(asked["what"])
            if how == "variable":
                os.environ[asked["name"]]
            if how == "hang":
                threading.Event().wait()
            if how == "bell":  # it makes the bell blocking for both sides, and rings without pause
                for fd in [fd for fd, name in files().items() if "eventfd" in name]:
                    os.set_blocking(fd, True)
                    threading.Thread(target=lambda fd=fd: [os.eventfd_write(fd, 1) for _ in range(20000)]).start()
            if how == "large":
                found = np.full(asked["bytes"], 7, np.uint8)
            elif how == "allocate":
                found = np.ones(asked["bytes"], np.uint8)[:1]
            elif how == "look":
                found = np.frombuffer(json.dumps({
                    "pid": os.getpid(), "parent": os.getppid(), "environ": dict(os.environ),
                    "first": Path("/proc/self/environ").read_text(), "files": list(files().values()),
                    "nice": os.nice(0), "uid": os.getuid(), "gid": os.getgid(),
                    "sid": os.getsid(0), "group": os.getpgid(0)}).encode(), np.uint8)
            else:
                found = request.inputs()[0].as_numpy().view(np.uint8)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]))
        return answers
"""
TEXT = config(outputs="OUT:TYPE_UINT8:-1")
ONE = np.ones(1, np.float32)


def parameters(**given: str) -> str:
    rows = (f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in given.items())
    return " " + " ".join(rows)


def call(server: ServerProcess, model: str = "many", array: np.ndarray = ONE, **asked: Any) -> np.ndarray:
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        found: np.ndarray = client.infer(model, [tensor], parameters=asked).as_numpy("OUT")
        return found


def look(server: ServerProcess, model: str = "many") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(server, model, how="look").tobytes())
    return found


def echo(server: ServerProcess, model: str, value: float) -> float:
    return float(call(server, model, np.full(1, value, np.float32)).view(np.float32)[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "many", MANY, TEXT)
    python_model(repository, "neighbour", MANY, TEXT)
    python_model(
        repository, "killed", MANY, TEXT
    )  # its first pauses are short: nothing else ends its process
    two = " instance_group { count: 2 kind: KIND_CPU }"
    python_model(repository, "here", MANY, TEXT + two + parameters(isolation="none"))
    limit = {} if SANITIZED else {"MEMORY_LIMIT_BYTES": str(1 << 30)}
    limited = parameters(NICE="3", THREADS="3", ENVIRONMENT="minimal,SECRET_*,MADE=here", **limit)
    python_model(repository, "limited", MANY, TEXT + limited)
    python_model(repository, "slow", MANY, TEXT + parameters(EXECUTE_TIMEOUT_SECONDS="1.5"))
    env = {**os.environ, "CLOUD_KEY": "hush", "SECRET_OF_LIMITED": "told", "NEPTRIO_TOKEN": "own"}
    # what a process says that finds its ring scribbled over
    with ServerProcess(repository, env=env, failures=r"process\.py:\d+\] \w+: Traceback") as process:
        yield process


def ready(server: ServerProcess, model: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        until(lambda: client.is_model_ready(model), server.log)


def test_the_default_is_a_process_per_instance(server: ServerProcess) -> None:
    found = look(server)
    assert found["pid"] != server.process.pid and found["parent"] == server.process.pid
    assert look(server, "here")["pid"] == server.process.pid
    assert found["group"] == found["pid"]  # the terminal's signals are the server's
    assert found["sid"] == os.getsid(server.process.pid)  # for the scheduler they are one group
    assert re.search(r"many .* 1 x CPU, own processes ", server.log())
    assert re.search(r"here .* 2 x CPU +\|", server.log())


@pytest.mark.slow
def test_none_for_all_from_the_command_line(tmp_path: Path) -> None:
    python_model(tmp_path, "many", MANY, TEXT)
    python_model(tmp_path, "apart", MANY, TEXT + parameters(isolation="process"))
    with ServerProcess(tmp_path, "--backend-config=python,isolation=none") as server:
        assert look(server)["pid"] == server.process.pid != look(server, "apart")["pid"]


@pytest.mark.parametrize("what", ["rings", "outputs", "descriptors"])
def test_a_process_that_scribbles_over_the_shared_memory(server: ServerProcess, what: str) -> None:
    """It fails its own requests with the cause, and nobody else's."""
    before = look(server)["pid"]
    ended = threading.Event()
    wrong: list[Any] = []

    def neighbour() -> None:
        i = 0
        while not ended.is_set():
            i += 1
            if echo(server, "neighbour", i) != i:
                wrong.append(i)

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        try:
            call(server, how="scribble", what=what)
        except InferenceServerException as error:
            assert "its process was killed" in error.message() or "its process exited" in error.message()
    finally:
        ended.set()
        thread.join(60)
    assert not wrong

    def serves() -> bool:
        try:
            return echo(server, "many", 6) == 6
        except InferenceServerException:
            return False

    until(serves, server.log)
    if what == "rings":
        assert look(server)["pid"] != before
    if what == "outputs":  # this part is its own: it may write there what it likes
        assert look(server)["pid"] == before


def test_a_process_that_misuses_its_bell(server: ServerProcess) -> None:
    call(server, how="bell")
    for i in range(20):
        assert echo(server, "neighbour", i) == i == echo(server, "many", i)


@pytest.mark.slow
def test_killed_at_any_moment(server: ServerProcess) -> None:
    """The pause before the next process doubles. Every request is answered, rightly or with the cause; the neighbour answers rightly."""
    chance = random.Random(1)
    answered: list[str] = []
    ended = threading.Event()

    def client(model: str, size: int) -> None:
        array = np.arange(size, dtype=np.float32)
        while not ended.is_set():
            try:
                found = call(server, model, array).view(np.float32)
                assert (found == array).all()
                answered.append(model)
            except InferenceServerException as error:
                assert model == "killed", error
                assert re.search("SIGKILL|is not at ready state", error.message()), error
                answered.append("failed")

    threads = [
        threading.Thread(target=client, args=a) for a in [("killed", 1), ("killed", 200000), ("neighbour", 1)]
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            ready(server, "killed")
            count = len(answered)
            until(lambda count=count: len(answered) > count + chance.randrange(10), server.log)
            for stat in Path("/proc").glob("[0-9]*/stat"):
                try:
                    text = stat.read_text()
                except OSError:
                    continue
                if "(py:killed_0)" in text and int(text.rpartition(")")[2].split()[1]) == server.process.pid:
                    os.kill(int(stat.parent.name), signal.SIGKILL)
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert {"killed", "neighbour", "failed"} <= set(answered)
    ready(server, "killed")
    assert echo(server, "killed", 3) == 3


@pytest.mark.slow
def test_a_hung_execute_is_bounded(server: ServerProcess) -> None:
    assert echo(server, "slow", 2) == 2
    with pytest.raises(InferenceServerException, match=r"did not return within 1\.5 s") as info:
        call(server, "slow", how="hang")
    assert info.value.status() == "504"
    ready(server, "slow")
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(ONE)
        with pytest.raises(InferenceServerException, match="EXECUTE_TIMEOUT_SECONDS") as info:
            client.infer("slow", [tensor], parameters={"how": "hang"})
        assert info.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    ready(server, "slow")
    assert echo(server, "slow", 3) == 3


def test_statistics_and_metrics_of_a_process(server: ServerProcess) -> None:
    pid = look(server)["pid"]
    (process,) = stats(server, "many")["processes"]
    assert (process["instance"], process["pid"]) == ("many_0", pid)
    assert process["resident_bytes"] > 1 << 20 and process["cpu_seconds"] >= 0 and process["ring"] == 0
    assert stats(server, "here")["processes"] == []
    text = urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode()
    labels = r'\{[^}]*instance="many_0"[^}]*\}'
    assert re.search(f"^neptrio_process_id{labels} {pid}$", text, re.M)
    assert re.search(f"^neptrio_process_resident_bytes{labels} [1-9]", text, re.M)
    assert re.search(f"^neptrio_process_restarts_total{labels} {process['restarts']}$", text, re.M)


def test_what_a_process_is_given(server: ServerProcess) -> None:
    found, limited = look(server), look(server, "limited")
    assert found["environ"]["CLOUD_KEY"] == "hush"  # as a Triton server's models
    assert "NEPTRIO_TOKEN" not in found["environ"] and "NEPTRIO_TOKEN" not in found["first"]
    assert found["environ"]["PATH"] == os.environ["PATH"]
    assert found["environ"]["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert limited["environ"]["SECRET_OF_LIMITED"] == "told" and limited["environ"]["MADE"] == "here"
    assert "CLOUD_KEY" not in limited["environ"] and limited["environ"]["OMP_NUM_THREADS"] == "3"
    assert "CLOUD_KEY" not in limited["first"] and "NEPTRIO_TOKEN" not in look(server, "here")["environ"]
    assert limited["nice"] == min(found["nice"] + 3, 19)  # the kernel has no more
    # nothing of the server's: its own socket, its output, its memory and bell
    kinds = sorted(re.sub(r"[:\d].*", "", name) for name in found["files"])
    assert kinds.count("socket") == 1 and not [name for name in found["files"] if "eventpoll" in name]


def test_what_a_process_is_not_given_is_said(server: ServerProcess) -> None:
    """At load, and to whoever looks for it."""
    said = re.findall(
        r"model '(\w+)' is not given (\d+) of the server's environment variables.*", server.log()
    )
    assert [name for name, _ in said] == ["limited"]
    assert re.search(r"because of environment=minimal: .*CLOUD_KEY", server.log())
    with pytest.raises(
        InferenceServerException, match=r"KeyError: .CLOUD_KEY \(the server has .* withholds it"
    ):
        call(server, "limited", how="variable", name="CLOUD_KEY")
    for model, name in (("limited", "NOWHERE"), ("limited", "NEPTRIO_TOKEN"), ("many", "NOWHERE")):
        with pytest.raises(InferenceServerException, match=f"KeyError: '{name}'"):
            call(server, model, how="variable", name=name)


@pytest.mark.slow
@no_memory_figures
@pytest.mark.skipif(
    memory_group.parent() is not None, reason="a control group limits it: test_memory_group.py"
)
def test_a_memory_limit(server: ServerProcess) -> None:
    assert call(server, how="allocate", bytes=2 << 30).tolist() == [1]
    with pytest.raises(InferenceServerException, match=r"MemoryError|Unable to allocate"):
        call(server, "limited", how="allocate", bytes=2 << 30)
    assert echo(server, "limited", 4) == 4


@pytest.mark.slow
def test_messages_that_are_larger_than_the_shared_memory(server: ServerProcess) -> None:
    found = call(server, how="large", bytes=70 << 20)
    assert found.shape == (70 << 20,) and (found == 7).all()


@pytest.mark.slow
def test_a_template_that_is_killed_is_started_again(tmp_path: Path) -> None:
    python_model(tmp_path, "one", MANY, TEXT)
    python_model(tmp_path, "two", MANY, TEXT)
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=one") as server:
        pid = look(server, "one")["pid"]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue
            if "(py:template)" in text and int(text.rpartition(")")[2].split()[1]) == server.process.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            client.load_model("two")
        assert look(server, "one")["pid"] == pid != look(server, "two")["pid"]
        assert look(server, "two")["parent"] == server.process.pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"isolation": "thread"}, "parameter 'isolation' must be 'none' or 'process', got 'thread'"),
        ({"NICE": "much"}, "parameter 'NICE' must be a whole number"),
        ({"THREADS": "0"}, "parameter 'THREADS' must be a whole number >= 1, got '0'"),
        ({"EXECUTE_TIMEOUT_SECONDS": "-1"}, "must be a number of seconds > 0, got '-1'"),
        ({"EXECUTE_TIMEOUT_SECONDS": "1", "isolation": "none"}, "leave out the parameters isolation 'none'"),
        ({"RUN_AS_GID": "1"}, "needs RUN_AS_UID"),
        ({"ENVIRONMENT": "=x"}, "must be minimal, NAME, PREFIX_* or NAME=VALUE"),
    ],
)
def test_parameters_that_cannot_be(tmp_path: Path, given: dict[str, str], reason: str) -> None:
    python_model(tmp_path, "odd", MANY, TEXT + parameters(**given))
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE" and reason in row["reason"]


PRELOAD = """
import json, os
import numpy as np

ARRAY = None

class TritonPythonModel:
    @classmethod
    def preload(cls, args):
        global ARRAY
        if args["model_name"] == "fails":
            raise ValueError("no weights here")
        print("preloading", flush=True)
        ARRAY = np.ones(200 << 20, np.uint8)

    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        rows = open("/proc/self/smaps_rollup").read().splitlines()
        private = sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))
        found = {"pid": os.getpid(), "parent": os.getppid(), "sum": int(ARRAY[::4096].sum()), "private": private << 10}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.frombuffer(json.dumps(found).encode(), np.uint8))])
                for _ in requests]
"""


@pytest.mark.slow
@no_memory_figures
def test_instances_share_what_was_preloaded(tmp_path: Path) -> None:
    """Four instances of a model with 200 MB need 200 MB."""
    python_model(tmp_path, "shared", PRELOAD, TEXT + " instance_group { count: 4 kind: KIND_CPU }")
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            client.load_model("shared")
            seen = {}
            for _ in range(400):
                found = json.loads(call(server, "shared").tobytes())
                seen[found["pid"]] = found
                if len(seen) > 1:
                    break
            for found in seen.values():
                assert found["sum"] == 51200 and found["parent"] == server.process.pid
                assert found["private"] < 40 << 20
            server.until_logged("preloading")
            client.unload_model("shared")
        until(lambda: not named(server, "py:"), "the processes are gone")
    assert server.log().count("preloading") == 1


def named(server: ServerProcess, text: str) -> list[str]:
    """The server's living children whose name begins so."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = stat.read_text()
        except OSError:
            continue
        fields = line.rpartition(")")[2].split()
        if f"({text}" in line and int(fields[1]) == server.process.pid and fields[0] != "Z":
            found.append(line)
    return found


@pytest.mark.slow
def test_a_preload_that_fails_says_why(tmp_path: Path) -> None:
    python_model(tmp_path, "fails", PRELOAD, TEXT)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert "preload of 'fails' failed" in row["reason"] and "ValueError: no weights here" in row["reason"]
