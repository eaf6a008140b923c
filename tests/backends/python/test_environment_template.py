"""Models with an environment of their own are forked from one process of its interpreter, where that can be."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import venv
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from tests.backends.python.models import HEAD, config, python_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.waiting import until

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
# says where it runs, what it has of the server's variables, and how many threads numpy has
MODEL = """
import ctypes
import glob
import os
import sys
import numpy as np

(library,) = glob.glob(os.path.dirname(np.__file__) + ".libs/*openblas*")
threads = ctypes.CDLL(library).scipy_openblas_get_num_threads64_()
said = [sys.prefix, str(os.getpid()), os.environ.get("FLAG", ""), os.environ["OMP_NUM_THREADS"], str(threads)]

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(said, dtype=object))]) for _ in requests]
"""
THREADS_AT_START = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
)
ENVIRONMENT = 'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{}" }} }}\n'
PARAMETER = 'parameters {{ key: "{}" value: {{ string_value: "{}" }} }}\n'


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (folder / SITE / "numpy.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    return folder


def model(repository: Path, name: str, environment: Path, extra: str = "") -> None:
    python_model(
        repository,
        name,
        MODEL,
        config("IN:TYPE_FP32:1", "OUT:TYPE_STRING:-1", 0, extra) + ENVIRONMENT.format(environment),
    )


def said(server: ServerProcess, name: str) -> list[str]:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
    with urlopen(f"http://{server.http}/v2/models/{name}/infer", json.dumps(body).encode()) as answer:
        found: list[str] = json.load(answer)["outputs"][0]["data"]
        return found


def templates(environment: Path) -> list[int]:
    """The processes that the environment's models are forked from."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text, line = stat.read_text(), (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if "(py:template)" in text and line.startswith(str(environment)):
            found.append(int(stat.parent.name))
    return found


def asks_a_template(server: ServerProcess) -> bool:
    """Whether it has both ends of a pipe: of what the process prints that it wants to have."""
    ends: collections.Counter[str] = collections.Counter()
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            ends[os.readlink(descriptor)] += 1
    return any(name.startswith("pipe:") and count > 1 for name, count in ends.items())


def load(server: ServerProcess, name: str, what: str = "load") -> None:
    with urlopen(f"http://{server.http}/v2/repository/models/{name}/{what}", b"{}"):
        pass


def forked(pid: str) -> bool:
    """Whether a process has the arguments of a template: a forked process keeps them."""
    return "main_of_environment" in Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
@no_memory_figures
def test_models_of_an_environment_share_its_template(tmp_path: Path, environment: Path) -> None:
    more = {"one": "", "two": PARAMETER.format("THREADS", 3), "three": PARAMETER.format("NICE", 1)}
    for name, extra in more.items():
        model(tmp_path, name, environment, extra)
    with ServerProcess(tmp_path, env={**os.environ, "FLAG": "on"}) as server:
        answers = {name: said(server, name) for name in more}
        (template,) = templates(environment)
        for name, (prefix, pid, flag, threads, blas) in answers.items():
            assert (prefix, flag, blas) == (str(environment), "on", threads), name
            assert forked(pid), name
            assert (
                int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == server.process.pid
            )
            kinds = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            (written,) = (int(kind.split()[1]) << 10 for kind in kinds if kind.startswith("Private_Dirty:"))
            assert written < 5 << 20, name
        assert answers["two"][3] == "3" != answers["one"][3]

        for ended in (template, int(answers["one"][1])):
            os.kill(ended, signal.SIGKILL)
        (prefix, pid, *_) = said(server, "one")  # waits until its process has started again
        assert prefix == str(environment)
        assert pid != answers["one"][1]
        assert forked(pid)
        assert templates(environment) != [template]
        assert said(server, "two") == answers["two"]


@pytest.mark.slow
def test_an_environment_without_numpy_is_told_by_its_model_alone(tmp_path: Path, environment: Path) -> None:
    (environment / SITE / "numpy.pth").unlink()
    model(tmp_path, "one", environment)
    with ServerProcess(tmp_path, "--exit-on-error=false", failures="No module named 'numpy'") as server:
        server.until_logged("No module named 'numpy'")
        # among what the model's process printed, as the reason of the load, and in the table: not from the template as well
        assert server.log().count("No module named 'numpy'") == 3


@pytest.mark.slow
def test_an_environment_that_runs_threads_is_not_forked_from(tmp_path: Path, environment: Path) -> None:
    starts = tmp_path.with_name(tmp_path.name + "-starts")
    noted = f"""
import sys
if "main_of_environment" in str(sys.orig_argv):
    with open({str(starts)!r}, "a") as file:
        file.write("template\\n")
"""
    # not sitecustomize: where Python is a distribution's own, that distribution's stands before the environment's
    (environment / SITE / "starts_threads.py").write_text(noted + THREADS_AT_START)
    (environment / SITE / "starts_threads.pth").write_text("import starts_threads\n")
    for name in ("one", "two"):
        model(tmp_path, name, environment, "instance_group { count: 3 kind: KIND_CPU }\n")
    with ServerProcess(tmp_path) as server:
        for name in ("one", "two"):
            prefix, pid, *_ = said(server, name)
            assert prefix == str(environment)
            assert not forked(pid)
        assert templates(environment) == []
        assert "cannot be used" not in server.log()
        # those that were waiting for it have not tried again
        assert starts.read_text() == "template\n"


@pytest.mark.slow
def test_the_end_of_a_process_is_told_while_its_template_hangs(tmp_path: Path, environment: Path) -> None:
    for name in ("one", "two"):
        model(tmp_path, name, environment)
    with ServerProcess(tmp_path) as server:
        pids = {name: int(said(server, name)[1]) for name in ("one", "two")}
        (template,) = templates(environment)
        os.kill(template, signal.SIGSTOP)
        try:
            os.kill(pids["one"], signal.SIGKILL)
            # the next is asked of the template, which says nothing for long
            server.until_logged("'one_0' failed")
            until(lambda: asks_a_template(server))
            os.kill(pids["two"], signal.SIGKILL)
            server.until_logged("'two_0' failed", seconds=15)
        finally:
            os.kill(template, signal.SIGKILL)


@pytest.mark.slow
def test_a_wrapper_of_an_interpreter_is_not_forked_from(tmp_path: Path, environment: Path) -> None:
    (environment / "bin" / "python").rename(environment / "bin" / "python-itself")
    wrapper = environment / "bin" / "python"
    wrapper.write_text(
        f'#!/bin/sh\n{environment}/bin/python-itself "$@"\n'
    )  # the server's child is the shell
    wrapper.chmod(0o755)
    model(tmp_path, "one", environment)
    with ServerProcess(tmp_path) as server:
        prefix, pid, *_ = said(server, "one")
        assert prefix == str(environment)
        assert not forked(pid)
        assert "cannot be used" not in server.log()
        until(lambda: not templates(environment))


@pytest.mark.slow
def test_a_template_does_not_outlive_what_its_interpreter_is_told_at_its_start(
    tmp_path: Path, environment: Path
) -> None:
    model(tmp_path, "one", environment)
    model(tmp_path, "two", environment)
    (tmp_path / "two" / "1" / "model.py").write_text("import found_later\n" + HEAD + MODEL)
    (environment / "more").mkdir()
    (environment / "more" / "found_later.py").touch()
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=one") as server:
        with (environment / SITE / "numpy.pth").open("a") as file:
            file.write(f"{environment}/more\n")
        load(server, "two")
        assert said(server, "two")[0] == str(environment)
