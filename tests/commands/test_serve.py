"""`neptrio serve`: a Python program's models, in processes of their own, with reload."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from tests.support.server import ServerProcess
from tests.support.waiting import until

APP = """
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import helper
import neptrio

server = neptrio.Server(metrics_port=0, id="mine")


@server.function
def scaled(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return helper.FACTOR * x


@server.function
def process() -> int:
    return os.getpid()


@server.function
def variable(name: str) -> str:
    return os.environ.get(name, "nothing")


@server.function
def count(n: int) -> Iterator[int]:
    yield from range(n)


@server.function(
    max_batch_size=4, inputs={"x": ("BYTES", [-1])}, outputs={"y": ("BYTES", [-1])}, batching={}
)
async def upper(x: np.ndarray) -> np.ndarray:
    return np.char.upper(x.astype(bytes)).astype(object)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    return tmp_path / "app.py"


def scaled(server: ServerProcess, *values: float) -> list[float]:
    with http_client.InferenceServerClient(server.http) as client:
        given = http_client.InferInput("x", [len(values)], "FP32")
        given.set_data_from_numpy(np.array(values, np.float32))
        found: list[float] = client.infer("scaled", [given]).as_numpy("OUTPUT").tolist()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "none"])
def test_functions_over_the_network(app: Path, isolation: str) -> None:
    command = ("serve", f"--isolation={isolation}", f"{app}:server")
    flags = ("--log-verbose=1", "--backend-config=python,environment=minimal")
    env = {**os.environ, "CLOUD_KEY": "of the program"}
    with ServerProcess(None, *flags, command=command, env=env) as server:
        assert scaled(server, 1, 2) == [2, 4]
        with http_client.InferenceServerClient(server.http) as client:
            name = http_client.InferInput("name", [1], "BYTES")
            name.set_data_from_numpy(np.array(["CLOUD_KEY"], object))
            found = client.infer("variable", [name]).as_numpy("OUTPUT").tolist()
            assert found == [b"of the program"]  # nothing is withheld from a program that is served
        with http_client.InferenceServerClient(server.http) as client:
            assert client.get_server_metadata()["name"] == "mine"
            pid = client.infer("process", []).as_numpy("OUTPUT")[0]
            assert (pid == server.process.pid) == (isolation == "none")
        with grpc_client.InferenceServerClient(server.grpc) as client:
            given = grpc_client.InferInput("x", [1, 2], "BYTES")
            given.set_data_from_numpy(np.array([[b"a", b"b"]], object))
            assert client.infer("upper", [given]).as_numpy("y").tolist() == [[b"A", b"B"]]


@pytest.mark.slow
def test_a_module_of_the_working_folder(app: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "neptrio", "serve", "app:server", "--http-port=nonsense"],
        cwd=app.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--http-port" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "status", "text"),
    [
        pytest.param("app.py", 2, "expected MODULE:SERVER or FILE.py:SERVER, got 'app.py'", id="no name"),
        pytest.param("app.py:nobody", 1, "'nobody' of module 'app' is no neptrio.Server", id="no server"),
        pytest.param("app.py:scaled", 1, "'scaled' of module 'app' is no neptrio.Server", id="a function"),
        pytest.param(
            "gone.py:server", 1, "there is no module 'gone', which would be gone.py in ", id="no file"
        ),
        pytest.param("gone.too:server", 1, "there is no module 'gone', ", id="no package"),
        pytest.param(
            "lacks.py:server", 1, "ModuleNotFoundError: No module named 'lack'\nerror: ", id="no import"
        ),
    ],
)
def test_programs_that_cannot_be_served(app: Path, target: str, status: int, text: str) -> None:
    (app.parent / "lacks.py").write_text("import lack\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "neptrio", "serve", target],
        cwd=app.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr
    assert ("Traceback" in done.stderr) == target.startswith("lacks"), done.stderr


def rewrite(app: Path, text: str) -> None:
    """Changes the module beside the program at once: nobody finds it empty."""
    (app.parent / "helper.new").write_text(text)
    (app.parent / "helper.new").replace(app.parent / "helper.py")


@pytest.mark.slow
def test_reload(app: Path) -> None:
    command = ("serve", "--reload", f"{app}:server")
    with ServerProcess(None, command=command, failures="SyntaxError") as server:
        assert scaled(server, 1) == [2]
        rewrite(app, "FACTOR = 30\n")
        server.until_logged("serving\n", 2)
        server.http = re.findall(r"REST +on https?://(\S+)", server.log())[-1]
        assert scaled(server, 1) == [30]
        rewrite(app, "FACTOR = \n")  # the program is broken for a while
        server.until_logged(
            "cannot be imported\nthe server starts again when a file changes; Ctrl-C ends this\n"
        )
        rewrite(app, "FACTOR = 4\n")
        server.until_logged("serving\n", 3)
        server.http = re.findall(r"REST +on https?://(\S+)", server.log())[-1]
        assert scaled(server, 1) == [4]


# the server is a process that reads what nobody writes, and a signal comes while it is started
SIGNALLED = """
import argparse, os, signal, subprocess, sys
from neptrio.commands import serve

class Interrupted(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)
        os.kill(os.getpid(), signal.SIGTERM)

serve.subprocess.Popen = Interrupted
print(serve.run(argparse.Namespace(app=sys.argv[1] + ":server", reload=True, isolation="none", flags=[])))
"""


def test_a_signal_that_comes_while_the_server_is_started_ends_it(app: Path) -> None:
    program = [sys.executable, "-c", SIGNALLED, str(app)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.wait(60) == 0
        finally:
            process.stdin.close()  # which ends what is left
            process.kill()
        assert process.stdout.read() == f"{-signal.SIGTERM}\n"


@pytest.mark.slow
def test_a_function_whose_process_is_killed_comes_back(app: Path) -> None:
    with ServerProcess(None, command=("serve", f"{app}:server")) as server:
        with http_client.InferenceServerClient(server.http) as client:
            before = client.infer("process", []).as_numpy("OUTPUT")[0]
            subprocess.run(["kill", "-9", str(before)], check=True)

            def another() -> bool:
                try:
                    return bool(client.infer("process", []).as_numpy("OUTPUT")[0] != before)
                except http_client.InferenceServerException:
                    return False

            until(another, "another process answers")
