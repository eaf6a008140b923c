"""A model's process may send anything over its socket: it is killed, its request fails, and nothing else happens.

What it could do to the rings is in tests/rings/test_ring_hostile.py. The messages are sent as a model would
that has taken its process over: past the library, on the same socket.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.memory import held
from tests.support.server import ServerProcess
from tests.support.waiting import until

HOSTILE = """
import fcntl, gc, json, os, socket, struct, threading
import numpy as np

def sock():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Wire")._sock

def memory(size, sealed=True):
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd

def frame(message, fds=()):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    data = struct.pack("<I", len(text)) + text
    sent = socket.send_fds(sock(), [data], list(fds)) if fds else 0
    sock().sendall(data[sent:])

def load(files, fds=()):
    frame({"t": "ask", "k": 1, "op": "load", "name": "good", "config": "", "files": files, "fds": len(fds)}, fds)

def act(how):
    if how == "not sealed":
        fd = memory(1 << 16, sealed=False)
        load([["file:1/model.py", 1 << 16]], [fd])
        os.ftruncate(fd, 0)
    elif how == "too short":
        load([["file:1/model.py", 1 << 20]], [memory(1 << 16)])
    elif how == "no memory":
        load([["file:1/model.py", 1 << 16]], [os.open("/dev/null", os.O_RDWR)])
    elif how == "a negative size":
        load([["file:1/model.py", 1 << 17], ["file:1/other.py", -(1 << 16)]], [memory(1 << 16)])
    elif how == "no file":
        load([["file:1/model.py", 1 << 16]])
    elif how == "no text":
        frame(b"{")
    elif how == "no object":
        frame(b"[]")
    elif how == "no descriptor":
        frame({"t": "message_segment", "k": 1, "size": 1 << 16, "fds": 1})
    elif how == "descriptors":
        fd = memory(8)
        for _ in range(100):
            socket.send_fds(sock(), [struct.pack("<I", 1 << 20) if _ == 0 else b" "], [fd] * 20)
    elif how == "a size that cannot be":
        for size, count in ((1 << 80, 1), (-1, 1), ("1", 1), (1 << 16, 2), (1 << 16, 0)):
            frame({"t": "message_segment", "k": 1, "size": size, "fds": count}, fds=[memory(1 << 16)] * count)
        frame({})
    elif how == "a number that there is not":
        frame({"t": "message_segment", "k": "1", "size": 1 << 16, "fds": 1}, fds=[memory(1 << 16)])
    elif how == "an end":
        sock().shutdown(socket.SHUT_WR)
    elif how == "answers":
        for _ in range(1000):
            frame({"t": "whatever"})
    elif how == "memory that there is not":
        frame({"t": "memory", "rows": [["GPU", 0, 1 << 20]]})
        frame({"t": "memory", "rows": [["GPU", 0, -1]]})
    elif how == "a number that cannot be":
        frame({"t": "memory", "rows": [["GPU", 0, []]]})

class TritonPythonModel:
    def initialize(self, args):
        self.hasty = args["model_name"] == "hasty"
        if self.hasty:
            frame({"t": "initialized"})

    def finalize(self):
        if self.hasty:
            frame({"t": "failed"})
            threading.Event().wait()

    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters()).get("how")
            if how:
                act(how)
                threading.Event().wait()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
TEXT = config("IN:TYPE_FP32:-1", "OUT:TYPE_FP32:-1")
CASES = {
    "not sealed": "not sealed or too small",
    "too short": "not sealed or too small",
    "no memory": "not sealed or too small",
    "a negative size": "files that cannot be",
    "no file": "files that cannot be",
    "no text": "JSONDecodeError",
    "no object": "a message that is no object",
    "no descriptor": "1 descriptors that have not come",
    "descriptors": "descriptors without messages",
    "a size that cannot be": "KeyError",
    "a number that there is not": "a segment whose number cannot be",
    "answers": "answers to what nobody asked",
    "memory that there is not": "memory that there is not",
    "a number that cannot be": "int() argument must be",
}


@pytest.fixture(scope="module", params=["own", "interpreter"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    extra = {
        "interpreter": ("EXECUTION_ENV_PATH", sys.prefix),
        "own": ("isolation", "process"),
    }[request.param]
    own = ' parameters {{ key: "{}" value: {{ string_value: "{}" }} }} '.format(*extra)
    python_model(repository, "hostile", HOSTILE, TEXT + own)
    python_model(repository, "good", HOSTILE, TEXT)
    python_model(repository, "hasty", HOSTILE, TEXT + own)
    flags = ("--model-control-mode=explicit", "--load-model=hostile", "--load-model=good")
    with ServerProcess(repository, *flags) as process:
        yield process


def infer(client: httpclient.InferenceServerClient, model: str, **parameters: str) -> float:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([7], np.float32))
    return float(client.infer(model, [tensor], parameters=parameters).as_numpy("OUT")[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES)
def test_it_is_killed_and_nothing_else_happens(server: ServerProcess, how: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.unload_model("hostile")  # a process that ended often is waited for longer and longer
        until(lambda: not client.is_model_ready("hostile"), server.log)
        client.load_model("hostile")
        assert infer(client, "hostile") == 7
        before = held(server.process.pid)
        with pytest.raises(InferenceServerException) as failed:
            infer(client, "hostile", how=how)
        assert "its process was killed: it sent what cannot be used: " in str(failed.value)
        assert CASES[how] in str(failed.value)
        assert infer(client, "good") == 7
        until(lambda: client.is_model_ready("hostile"), server.log)
        assert infer(client, "hostile") == 7
        until(lambda: held(server.process.pid).within(before), "nothing of it is kept")
        assert all(client.is_model_ready(model) for model in ("hostile", "good"))


@pytest.mark.slow
def test_an_answer_that_says_nothing(server: ServerProcess) -> None:
    """Of initialize(), which goes on, and of finalize(), which does not return."""
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(2):  # what the first use of anything makes stays
            before = held(server.process.pid)
            client.load_model("hasty")
            assert infer(client, "hasty") == 7
            client.unload_model("hasty")
        until(lambda: held(server.process.pid).within(before), "nothing of it is left")


@pytest.mark.slow
def test_the_end_of_its_socket(server: ServerProcess) -> None:
    """It says what the process did, and not that somebody killed it."""
    with httpclient.InferenceServerClient(server.http) as client:
        client.unload_model("hostile")
        until(lambda: not client.is_model_ready("hostile"), server.log)
        client.load_model("hostile")
        with pytest.raises(InferenceServerException) as failed:
            infer(client, "hostile", how="an end")
        assert "its process was killed: it has closed its socket to the server" in str(failed.value)
