"""A model's process may send anything over its socket: it is killed, its request fails, and nothing else happens.

What it could do to the rings is in tests/rings/test_ring_hostile.py. The messages are sent as a model would
that has taken its process over: past the library, on the same socket.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.memory import held
from tests.support.server import FRONTENDS, ServerProcess
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

def frame(message, blob=b"", fds=()):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    data = struct.pack("<II", len(text), len(blob)) + text + blob
    sent = socket.send_fds(sock(), [data], list(fds)) if fds else 0
    sock().sendall(data[sent:])

def tensor(dtype=11, shape=(1,), **where):
    return {"n": "IN", "d": dtype, "s": list(shape), **where}

def call(row, blob=b""):
    frame({"t": "call", "model": "good", "version": -1, "id": "", "sequence": 0, "flags": 0, "timeout": 0, "p": {},
           "in": [row], "w": [], "parent": None, "batch": 0, "k": 1, "decoupled": False, "blocking": False}, blob)

def segment(id, size, fd):
    frame({"t": "segment", "id": id, "size": size}, fds=[fd])

def act(how):
    if how == "not sealed":
        fd = memory(1 << 16, sealed=False)
        segment(900, 1 << 16, fd)
        os.ftruncate(fd, 0)
        call(tensor(shape=(1 << 14,), seg=[900, 1 << 16]))
    elif how == "too short":
        segment(900, 1 << 20, memory(1 << 16))
    elif how == "no memory":
        segment(900, 1 << 16, os.open("/dev/null", os.O_RDWR))
    elif how == "outside of a segment":
        segment(900, 1 << 16, memory(1 << 16))
        call(tensor(shape=(1 << 24,), seg=[900, 1 << 26]))
    elif how == "no segment":
        call(tensor(seg=[901, 4]))
    elif how == "outside of the message":
        call(tensor(shape=(1 << 20,), at=[0, 1 << 22]), b"four")
    elif how == "too few bytes":
        call(tensor(shape=(1 << 20,), at=[0, 4]), b"four")
    elif how == "a product that overflows":
        call(tensor(shape=(1 << 32, 1 << 32), at=[0, 0]))
    elif how == "a negative shape":
        call(tensor(shape=(-1, -1), at=[0, 4]), b"four")
    elif how == "no datatype":
        call(tensor(dtype=99, at=[0, 4]), b"four")
    elif how == "strings":
        call(tensor(dtype=13, shape=(1,), at=[0, 8]), struct.pack("<I", 1000) + b"four")
    elif how == "no text":
        frame(b"{")
    elif how == "no object":
        frame(b"[]")
    elif how == "no descriptor":
        frame({"t": "segment", "id": 900, "size": 1 << 16})
    elif how == "descriptors":
        fd = memory(8)
        for _ in range(100):
            socket.send_fds(sock(), [struct.pack("<II", 1 << 20, 0) if _ == 0 else b" "], [fd] * 20)
    elif how == "a size that cannot be":
        for size, count in ((1 << 80, 1), (-1, 1), ("1", 1), (1 << 16, 2), (1 << 16, 0)):
            frame({"t": "message_segment", "k": 1, "size": size, "fds": count}, fds=[memory(1 << 16)] * count)
        frame({"t": "took", "k": [2]})
    elif how == "answers":
        for _ in range(1000):
            frame({"t": "whatever"})
    elif how == "memory that there is not":
        frame({"t": "memory", "rows": [["GPU", 0, 1 << 20]]})
        frame({"t": "memory", "rows": [["GPU", 0, -1]]})
    elif how == "a key that cannot be":
        frame({"t": "took", "k": [1]})

class TritonPythonModel:
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
    "not sealed": "not sealed",
    "too short": "does not have 1048576 bytes",
    "no memory": "not sealed",
    "outside of a segment": "outside of its segment",
    "no segment": "outside of its segment",
    "outside of the message": "outside of its message",
    "too few bytes": "1048576 elements of datatype 11 in 4 bytes",
    "a product that overflows": "more elements than there can be",
    "a negative shape": "a shape that cannot be",
    "no datatype": "a tensor of datatype 99",
    "strings": "strings that end too early",
    "no text": "JSONDecodeError",
    "no object": "a message that is no object",
    "no descriptor": "a descriptor that has not come",
    "descriptors": "descriptors without messages",
    "a size that cannot be": "unhashable",
    "answers": "answers to what nobody asked",
    "memory that there is not": "memory that there is not",
    "a key that cannot be": "unhashable",
}


@pytest.fixture(scope="module", params=["rings", "interpreter", "socket"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    if request.param == "socket" and FRONTENDS:
        pytest.skip("front ends need what this system lacks")
    repository: Path = tmp_path_factory.mktemp("repository")
    extra = {
        "interpreter": ("EXECUTION_ENV_PATH", sys.prefix),
        "socket": ("ENVIRONMENT", "PYTHONPATH="),  # what is done to the server below is not done to the model
        "rings": ("isolation", "process"),
    }[request.param]
    own = ' parameters {{ key: "{}" value: {{ string_value: "{}" }} }} '.format(*extra)
    python_model(repository, "hostile", HOSTILE, TEXT + own)
    python_model(repository, "good", HOSTILE, TEXT)
    flags = ("--model-control-mode=explicit", "--load-model=hostile", "--load-model=good")
    env = dict(os.environ)
    if request.param == "socket":  # a system without what rings need: all goes over the socket
        folder = tmp_path_factory.mktemp("site")
        (folder / "sitecustomize.py").write_text("import fcntl\ndel fcntl.F_ADD_SEALS\n")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
    with ServerProcess(repository, *flags, env=env) as process:
        yield process


def infer(client: httpclient.InferenceServerClient, model: str, **parameters: str) -> float:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([7], np.float32))
    return float(client.infer(model, [tensor], parameters=parameters).as_numpy("OUT")[0])


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
        assert {entry["state"] for entry in client.get_model_repository_index()} == {"READY"}
