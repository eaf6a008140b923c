"""What a model in a process of its own adds: its death, its environment, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import sys
import threading
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python import test_bls as bls
from tests.backends.python import test_decoupled as decoupled
from tests.backends.python import test_execute as execute
from tests.backends.python.models import config, isolated, python_model
from tests.support.memory import Held, held
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

KILLER = """
import json, os, signal, threading
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        how = json.loads(requests[0].parameters())["how"]
        if how == "exit":
            print("about to leave", flush=True)
            os._exit(3)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            pb_utils.Logger.log_info("hanging")
            threading.Event().wait()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, os.getpid(), np.float32))])
                for _ in requests]
"""

METRIC = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("requests_seen", "Requests", pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"model": "metric"})

    def execute(self, requests):
        self.metric.increment(len(requests))
        try:
            self.metric.set(1)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_warn(f"no: {error}")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + self.metric.value())])
                for r in requests]
"""

KEEPER = """
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        # arrays stay valid for as long as the model holds them
        self.kept.append(requests[0].inputs()[0].as_numpy())
        ok = all((array == array[0]).all() for array in self.kept) and len({a[0] for a in self.kept}) == len(self.kept)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(300000, ok, np.float32))])]
"""

ENVIRONMENT = """
import sys
import numpy as np

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        c.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
        return c

    def execute(self, requests):
        import only_here
        answer = [sys.prefix, only_here.VALUE, str("neptrio" in sys.modules)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(answer, dtype=object))]) for _ in requests]
"""


def call(server: ServerProcess, model: str, array: np.ndarray, **parameters: Any) -> Any:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], parameters=parameters).as_numpy("OUT")


def children(pid: int) -> set[int]:
    """The living child processes of a process, but for the template they are forked from, and for front ends."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if (
            int(fields[1]) == pid
            and fields[0] != "Z"
            and not re.search(r"\((py:template|neptrio:front.*)\)", text)
        ):
            found.add(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


ONE = np.zeros(1, np.float32)


@pytest.fixture
def killer(tmp_path: Path) -> Iterator[ServerProcess]:
    isolated(tmp_path, "killer", KILLER)
    python_model(tmp_path, "double", bls.DOUBLE)
    with ServerProcess(tmp_path) as process:
        yield process


def ready_again(server: ServerProcess, model: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        until(lambda: client.is_model_ready(model), server.log)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("exit", r"its process exited with status 3; its last output was:\nabout to leave"),
        ("segfault", r"its process was killed by signal 11 \(SIGSEGV\)"),
    ],
)
def test_death_fails_the_request_with_the_cause_and_the_model_restarts(
    killer: ServerProcess, how: str, cause: str
) -> None:
    first, restarts = call(killer, "killer", ONE, how="pid")[0], killer.log().count("runs again")
    failed = "the model instance 'killer_0' failed: "
    told, said = killer.log().count(failed), killer.log().count("about to leave")
    with httpclient.InferenceServerClient(killer.http) as client:
        with pytest.raises(InferenceServerException, match=cause) as info:
            call(killer, "killer", ONE, how=how)
        assert info.value.status() == "500"
        # not ready before the answer was out, and not before the restart
        (row,) = [r for r in client.get_model_repository_index() if r["name"] == "killer"]
        if row["state"] != "UNAVAILABLE":
            killer.until_logged("runs again", restarts + 1)
        assert client.is_model_ready("double")
    assert call(killer, "double", ONE + 1)[0] == 2
    ready_again(killer, "killer")
    assert call(killer, "killer", ONE, how="pid")[0] != first
    # the log has it once, and what the process printed once, with the instance that it is of
    assert killer.log().count(failed) == told + 1
    assert killer.log().count("about to leave") == said + (how == "exit")
    assert how != "exit" or "] killer_0: about to leave\n" in killer.log()


@pytest.mark.slow
def test_a_killed_process_makes_the_model_not_ready_with_its_reason(tmp_path: Path) -> None:
    """initialize() fails after the first time, so the model stays down: its state can be looked at."""
    code = """
import pathlib

class TritonPythonModel:
    def initialize(self, args):
        flag = pathlib.Path(args["model_repository"]) / "started"
        if flag.exists():
            raise RuntimeError("not twice")
        flag.write_text("")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
    isolated(tmp_path, "once", code)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        assert client.is_server_ready() and call(server, "once", ONE + 1)[0] == 1
        (pid,) = children(server.process.pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not client.is_model_ready("once"), "the model is not ready")
        until(lambda: not client.is_server_ready(), "nor is the server, once its loop has heard of it")
        server.until_logged("restart of once_0 failed")
        (row,) = client.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE"
        assert "SIGKILL" in row["reason"] or "not twice" in row["reason"]
        with pytest.raises(InferenceServerException, match="version 1 is not at ready state") as info:
            call(server, "once", ONE)
        assert info.value.status() == "503"
        (tmp_path / "once/started").unlink()
        ready_again(server, "once")
        assert call(server, "once", ONE + 1)[0] == 1


@pytest.mark.slow
def test_what_it_had_begun_fails_when_the_process_dies(killer: ServerProcess) -> None:
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(killer.grpc) as client:
        for _ in range(5):
            tensor = grpcclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(ONE)
            client.async_infer(
                "killer", [tensor], lambda result, error: results.put(error), parameters={"how": "hang"}
            )
        for ended in range(5):  # the others run (and hang) in the next process
            until(lambda ended=ended: killer.log().count("hanging") > ended, killer.log)
            assert results.empty()
            for pid in children(killer.process.pid):
                os.kill(pid, signal.SIGKILL)
            assert "SIGKILL" in results.get(timeout=60).message()
    ready_again(killer, "killer")
    assert call(killer, "killer", ONE, how="pid")[0] > 0


@pytest.mark.slow
def test_initialize_has_a_time_limit(tmp_path: Path) -> None:
    code = "import threading\n\nclass TritonPythonModel:\n    def initialize(self, args):\n        threading.Event().wait()\n\n    def execute(self, requests):\n        pass\n"
    limit = ' parameters { key: "INITIALIZE_TIMEOUT_SECONDS" value: { string_value: "1.5" } }'
    isolated(tmp_path, "stuck", code, config() + limit)
    # nothing else has the limit, which a busy machine might reach before
    flags = ("--exit-on-error=false", "--disable-auto-complete-config")
    with ServerProcess(tmp_path, *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert "initialize of 'stuck_0' did not return within 1.5 s; its process was killed" in row["reason"]
        assert not children(server.process.pid)


NEVER_COMPLETES = """
import sys
import threading

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("completing for ever", file=sys.stderr, flush=True)
        threading.Event().wait()

    def execute(self, requests):
        pass
"""


@pytest.mark.slow
def test_auto_complete_config_has_the_same_time_limit(tmp_path: Path) -> None:
    limit = ' parameters { key: "INITIALIZE_TIMEOUT_SECONDS" value: { string_value: "1.5" } }'
    isolated(tmp_path, "stuck", NEVER_COMPLETES, config() + limit)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE"
        assert (
            "auto_complete_config of 'stuck' did not return within 1.5 s; its process was killed"
            in row["reason"]
        )
        assert not children(server.process.pid)


@pytest.mark.slow
def test_shutdown_does_not_wait_for_auto_complete_config(tmp_path: Path) -> None:
    isolated(tmp_path, "stuck", NEVER_COMPLETES, config())  # its limit is 300 s
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            ended = threading.Thread(target=load_in_vain, args=(client,))
            ended.start()
            until(lambda: "completing for ever" in server.log(), server.log)
            (child,) = children(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            ended.join()
        until(lambda: not alive(child), "the child was killed")


def load_in_vain(client: httpclient.InferenceServerClient) -> None:
    with contextlib.suppress(Exception):  # the server goes
        client.load_model("stuck")


@pytest.mark.slow
def test_execution_environment(tmp_path: Path) -> None:
    """A virtual environment with a package of its own, inside the model's folder."""
    folder = tmp_path / "elsewhere"
    parameter = (
        ' parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }'
    )
    model = python_model(folder, "elsewhere", ENVIRONMENT, 'backend: "python"' + parameter)
    environment = model / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    site = environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "only_here.py").write_text("VALUE = 'found'\n")
    (site / "numpy.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    with ServerProcess(folder) as server:
        assert call(server, "elsewhere", ONE).tolist() == [str(environment).encode(), b"found", b"False"]
    # for all models of a backend, but for one that asks for the server's process
    python_model(folder, "elsewhere", ENVIRONMENT, 'backend: "python"')
    here = 'backend: "python" parameters { key: "isolation" value: { string_value: "none" } }'
    python_model(
        folder, "here", ENVIRONMENT.replace("import only_here", "").replace("only_here.VALUE", "'-'"), here
    )
    with ServerProcess(folder, f"--backend-config=python,execution-env-path={environment}") as server:
        assert call(server, "elsewhere", ONE).tolist() == [str(environment).encode(), b"found", b"False"]
        assert call(server, "here", ONE).tolist() == [sys.prefix.encode(), b"-", b"True"]


@pytest.mark.slow
def test_a_server_with_thousands_of_variables_still_forks_its_models(tmp_path: Path) -> None:
    """Kubernetes gives a container some for each service of its namespace."""
    variables = {f"SERVICE_{i}_PORT": "tcp://10.0.0.1:8080".ljust(60, "0") for i in range(4000)}
    isolated(tmp_path, "metric", METRIC)
    with ServerProcess(tmp_path, env={**os.environ, **variables}) as server:
        assert call(server, "metric", ONE)[0] == 1
    assert "the template process cannot be used" not in server.log()


def test_an_environment_that_is_none_is_refused(tmp_path: Path) -> None:
    parameter = ' parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/nowhere/env.tar.gz" } }'
    python_model(tmp_path, "nowhere", ENVIRONMENT, 'backend: "python"' + parameter)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert "EXECUTION_ENV_PATH '/nowhere/env.tar.gz' does not exist" in row["reason"]


@pytest.mark.slow
def test_custom_metrics_logs_and_kept_arrays(tmp_path: Path) -> None:
    isolated(tmp_path, "metric", METRIC)
    isolated(tmp_path, "keeper", KEEPER)
    with ServerProcess(tmp_path) as server:
        assert call(server, "metric", ONE)[0] == 1 and call(server, "metric", ONE)[0] == 2
        text = urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode()
        assert re.search(r'^requests_seen\{model="metric"\} 2(\.0)?$', text, re.M), text
        server.until_logged("no: a counter has no set")
        assert re.search(r"model.py:\d+\] no: a counter has no set", server.log())
        for i in range(6):
            assert call(server, "keeper", np.full(300000, i + 1, np.float32))[0] == 1


@pytest.mark.slow
def test_nothing_is_left_after_unload(tmp_path: Path) -> None:
    isolated(tmp_path, "reuse", execute.REUSE)
    isolated(tmp_path, "repeat", decoupled.REPEAT, config(extra=decoupled.DECOUPLED))

    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            first: Held | None = None
            for _ in range(3):
                for name in ("reuse", "repeat"):
                    client.load_model(name)
                assert len(children(server.process.pid)) == 2
                for _ in range(3):
                    assert call(server, "reuse", ONE + 5).tolist() == [5.0] * 100000
                for name in ("reuse", "repeat"):
                    client.unload_model(name)
                # gone and waited for: one that ended a moment ago is still held
                until(lambda: held(server.process.pid).children == 0, "the models' processes are gone")
                first = first or held(server.process.pid)

                until(
                    lambda first=first: held(server.process.pid).within(first),
                    lambda first=first: f"{held(server.process.pid)}, not more than {first}",
                )
            assert first is not None and first.children == 0


@pytest.mark.slow
def test_children_end_with_the_server(tmp_path: Path) -> None:
    isolated(tmp_path, "reuse", execute.REUSE)
    server = ServerProcess(tmp_path)
    (pid,) = children(server.process.pid)
    server.process.kill()
    server.stop()
    until(lambda: not alive(pid), "the model's process ends")


def chain(*models: str) -> str:
    """An ensemble of these models, one after the other."""
    names = ["IN", *(f"m{i}" for i in range(1, len(models))), "OUT"]
    steps = [
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "IN" value: "{names[i]}" }} '
        f'output_map {{ key: "OUT" value: "{names[i + 1]}" }} }}'
        for i, model in enumerate(models)
    ]
    return (
        'platform: "ensemble" input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ] '
        'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ] '
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    )


@pytest.mark.slow
def test_the_collector_finds_the_calls_of_an_isolated_model(tmp_path: Path) -> None:
    """Small tensors lie in received messages, and requests in cycles: a collection, as the server's end
    makes one, must not pull the memory from under them."""
    calls = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceRequest(model_name="inner", inputs=r.inputs(), requested_output_names=["OUT"]).exec()
                for r in requests]
"""
    echo = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
    isolated(tmp_path, "echo", echo)
    isolated(tmp_path, "calls", calls)
    write_model(tmp_path, "inner", chain("echo", "echo"), {})
    write_model(tmp_path, "outer", chain("echo", "calls", "echo"), {})
    with (
        ServerProcess(tmp_path) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        tensor = httpclient.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(np.array([1, 2], np.float32))
        for _ in range(20):
            assert client.infer("outer", [tensor]).as_numpy("OUT").tolist() == [1, 2]
