"""Models whose processes run as another user: RUN_AS_UID and RUN_AS_GID. The server must be root for that."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, python_model
from tests.support.http import Http1
from tests.support.sanitizer import SANITIZED
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run models as other users")

NOBODY, GROUP = 65534, 65533
MODEL = """
import ctypes, json, os
import numpy as np

PRELOADED = None

class TritonPythonModel:
    PRELOAD

    def execute(self, requests):
        if requests[0].request_id() == "hang":  # with the GIL
            print("nothing else runs now", flush=True)
            ctypes.PyDLL(None).pause()
        try:
            os.kill(os.getppid(), 0)
            allowed = True
        except PermissionError:
            allowed = False
        found = {"pid": os.getpid(), "users": os.getresuid(), "groups": [os.getresgid(), os.getgroups()],
                 "preloaded": PRELOADED, "may signal the server": allowed}
        out = np.frombuffer(json.dumps(found).encode(), np.uint8)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
"""
PRELOAD = """@classmethod
    def preload(cls, args):
        global PRELOADED
        PRELOADED = os.getresuid()
"""
TEXT = config(outputs="OUT:TYPE_UINT8:-1")
USER = ' parameters { key: "RUN_AS_UID" value: { string_value: "65534" } }'
BOTH = USER + ' parameters { key: "RUN_AS_GID" value: { string_value: "65533" } }'


@pytest.fixture
def repository() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def look(server: ServerProcess, model: str, id: str = "") -> dict[str, Any]:
    with httpclient.InferenceServerClient(server.http, network_timeout=100) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        found: dict[str, Any] = json.loads(
            client.infer(model, [tensor], request_id=id).as_numpy("OUT").tobytes()
        )
        return found


@pytest.mark.slow
def test_a_model_runs_as_the_user_that_it_names(repository: Path) -> None:
    python_model(repository, "plain", MODEL.replace("    PRELOAD\n", "\n"), TEXT)
    python_model(repository, "user", MODEL.replace("    PRELOAD\n", "\n"), TEXT + USER)
    python_model(repository, "both", MODEL.replace("    PRELOAD\n", "    " + PRELOAD), TEXT + BOTH)
    with ServerProcess(repository) as server:
        assert look(server, "plain")["users"] == [0, 0, 0]
        found = look(server, "user")
        assert found["users"] == [NOBODY] * 3 and found["groups"] == [[NOBODY] * 3, [NOBODY]]
        assert not found["may signal the server"]
        found = look(server, "both")
        assert found["users"] == [NOBODY] * 3 and found["groups"] == [[GROUP] * 3, [GROUP]]
        assert found["preloaded"] == [NOBODY] * 3  # which is the model's code, too


WRAPPER = """#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
echo "$(id -u) $(id -g) ${SECRET-none} ${WORD-none} $(ulimit -d)" >> "$root/runs"
exec PYTHON "$@"
"""


def environment(folder: Path) -> Path:
    """An archive whose interpreter notes as whom, and with what, it runs; and so does its conda-unpack."""
    wrapper = WRAPPER.replace("PYTHON", sys.executable).encode()
    path = folder / "env.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in (("bin/python", wrapper), ("bin/conda-unpack", b"print('unpacked')\n")):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.slow
def test_all_that_an_archive_brings_runs_as_the_model(repository: Path) -> None:
    """Its interpreter is the model's, too: it must not begin as the server and change then."""
    given = {
        "EXECUTION_ENV_PATH": f"{environment(repository)}",
        "ENVIRONMENT": "minimal,WORD=known",
        "MEMORY_LIMIT_BYTES": f"{4 << 30}",
    }
    more = "".join(
        f' parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}' for key, text in given.items()
    )
    cache = repository / "cache"
    models = repository / "models"
    python_model(models, "both", MODEL.replace("    PRELOAD\n", "\n"), TEXT + BOTH + more)
    flags = (f"--backend-config=python,environment-cache-directory={cache}", "--exit-on-error=false")
    with ServerProcess(models, *flags, env={**os.environ, "SECRET": "told"}):
        (runs,) = cache.glob("*/runs")
    lines = runs.read_text().splitlines()
    assert len(lines) >= 2  # conda-unpack, and the model's process
    assert {line.rpartition(" ")[0] for line in lines} == {f"{NOBODY} {GROUP} none known"}
    assert lines[0].endswith(f" {(4 << 30) // 1024}")  # the model's process may have a control group instead
    assert runs.parent.stat().st_uid == NOBODY and runs.parent.name.endswith(f"-{NOBODY}-{GROUP}")


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED, reason="the sanitizers' library does not forward the call")
def test_it_ends_with_the_server(repository: Path) -> None:
    """Even when no thread of it can run; the kernel forgets that it should when a process changes its user."""
    python_model(repository, "user", MODEL.replace("    PRELOAD\n", "\n"), TEXT + USER)
    server = ServerProcess(repository)
    pid = look(server, "user")["pid"]
    body = {"id": "hang", "inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]}
    with Http1(server.http) as client:
        client.start("POST", "/v2/models/user/infer", json.dumps(body).encode())
        server.until_logged("nothing else runs now")
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not runs(pid), "the process is gone")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
