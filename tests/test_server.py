"""Start and stop of a real server: what it prints, signals, the exit timeout."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.latch import Latch
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

GATED = """
import os, pathlib
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = os.environ["GATE_FOLDER"]

    def execute(self, requests):
        open(os.path.join(self.folder, "entered"), "w").close()
        pathlib.Path(self.folder, "open").read_bytes()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]

    def finalize(self):
        open(os.path.join(self.folder, "finalized"), "w").close()
"""


def listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


class Gate:
    """A server with a model whose execution waits for open(), and one request inside it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, *flags: str) -> None:
        monkeypatch.setenv("GATE_FOLDER", str(tmp_path))
        self._latch = Latch(tmp_path / "open")
        repository = tmp_path / "models"
        io = 'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
        write_model(repository, "gated", f'backend: "python" {io}', {"1/model.py": GATED})
        self.server = ServerProcess(repository, *flags)
        self.answers: list[object] = []
        module = httpclient if protocol == "http" else grpcclient
        address = self.server.http if protocol == "http" else self.server.grpc
        self.address = address

        def infer() -> None:
            try:
                with module.InferenceServerClient(address) as client:
                    tensor = module.InferInput("X", [1], "FP32")
                    tensor.set_data_from_numpy(np.array([2.5], np.float32))
                    self.answers.append(float(client.infer("gated", [tensor]).as_numpy("Y")[0]))
            except Exception as error:
                self.answers.append(error)

        self.thread = threading.Thread(target=infer)
        self.thread.start()
        until((tmp_path / "entered").exists, self.server.log)

    def open(self) -> None:
        self._latch.open()

    def close(self) -> None:
        """Waits for the request's end; the server has ended."""
        self.open()
        self.thread.join(300)
        self.server.stop()


def test_the_start_up_text(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config(), versions=(1, 3))
    write_model(tmp_path, "bad", 'backend: "identity"\nmax_batch: 3')
    write_model(tmp_path, "nothing", 'backend: "nonesuch"')
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        rows = [line.split("|")[1:-1] for line in server.log().splitlines() if line.startswith("|")]
        cells = {row[0].strip(): [c.strip() for c in row[1:]] for row in rows}
        assert cells["Model"] == ["Version", "State", "Runs on", "Reason"]
        assert cells["good"] == ["3", "READY", "1 x CPU", ""]
        assert cells["bad"][1] == "UNAVAILABLE" and "config.pbtxt" in server.log()
        assert "did you mean 'max_batch_size'?" in " ".join(server.log().split())
        assert "'nonesuch'" in cells["nothing"][3]
        assert server.http and server.grpc and server.metrics
        server.until_logged("accelerators: ")
        # what only this server's authors want to know is said with --log-verbose=1
        assert "sockets are waited for" not in server.log() and "HTTP/2 session" not in server.log()
    for line in ("loading: good:3", "successfully loaded 'good' version 3 in ", "(1 x CPU)"):
        assert line in server.log()
    for line in (
        "stopping: 0 requests under way",
        "unloading: good:3",
        "successfully unloaded 'good' version 3",
        "stopped",
    ):
        server.until_logged(f"] {line}\n")


@pytest.mark.slow
def test_every_model_has_its_lines(tmp_path: Path) -> None:
    """However many there are: what limits floods counts each model for itself."""
    for number in range(30):
        write_model(tmp_path, f"m{number}", identity_config())
    with ServerProcess(tmp_path) as server:
        pass
    for begin in ("loading: m", "successfully loaded 'm", "unloading: m", "successfully unloaded 'm"):
        assert server.log().count(f"] {begin}") == 30
    assert "left out" not in server.log()


@pytest.mark.slow
def test_what_only_authors_want_to_know_is_verbose(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    with ServerProcess(tmp_path, "--log-verbose=1") as server:
        server.until_logged("] sockets are waited for: in trio's stead; HTTP/2 session: ")


def test_a_failed_model_ends_the_start(tmp_path: Path) -> None:
    """The models that are well are shown as that, and the end says what failed and what to type."""
    write_model(tmp_path, "bad", 'backend: "identity" max_batch: 3')
    write_model(tmp_path, "good", identity_config())
    with pytest.raises(AssertionError, match="did not start") as info:
        ServerProcess(tmp_path)
    text = str(info.value)
    assert re.search(r"^\| good +\| 1 +\| READY +\| 1 x CPU ", text, re.M)
    assert "1 of 2 models did not load: bad\n" in text
    command = re.search(r"^  neptrio (check --model bad .*)$", text, re.M)
    assert command is not None and "--exit-on-error=false" in text
    check = [sys.executable, "-m", "neptrio", *shlex.split(command[1])]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "did you mean 'max_batch_size'?" in done.stdout
    assert "UNAVAILABLE" in text and "error: creating server: Internal - failed to load all models" in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--log-file", "--access-log-file", "--audit-log"])
def test_a_file_that_cannot_be_opened_is_told_with_its_flag(tmp_path: Path, flag: str) -> None:
    write_model(tmp_path, "good", identity_config())
    file = tmp_path / "nowhere/log"
    with pytest.raises(AssertionError) as info:
        ServerProcess(tmp_path, "--access-log=json", f"{flag}={file}")
    assert f"error: creating server: {flag}: '{file}' cannot be opened: No such file or directory\n" in str(
        info.value
    )


@pytest.mark.slow
def test_a_socket_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(AssertionError) as info:
        ServerProcess(tmp_path, f"--admin-address=unix:{taken}")
    assert (
        f"error: creating server: cannot listen on unix:{taken}: there is something else, which is no socket"
        in str(info.value)
    )


def test_an_address_that_is_none_names_the_flag_of_the_address(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    with pytest.raises(
        AssertionError, match=r"cannot listen on http://localhost:.*--http-address chooses another"
    ):
        ServerProcess(tmp_path, "--http-address=http://localhost")


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port", "--admin-address"])
def test_a_port_that_is_taken(tmp_path: Path, flag: str) -> None:
    write_model(tmp_path, "good", identity_config())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AssertionError,
            match=f"error: creating server: cannot listen on 127.0.0.1:{port}: Address already in use .{flag} chooses",
        ) as info:
            ServerProcess(tmp_path, f"{flag}={'127.0.0.1:' if flag == '--admin-address' else ''}{port}")
        assert "Traceback" not in str(info.value) and "Errno" not in str(info.value)


def test_two_servers_share_a_port_when_asked(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    with ServerProcess(tmp_path, "--reuse-http-port=true", "--reuse-grpc-port=true") as first:
        http, grpc = first.http.split(":")[1], first.grpc.split(":")[1]
        flags = (f"--http-port={http}", f"--grpc-port={grpc}", "--reuse-http-port=1", "--reuse-grpc-port=on")
        with ServerProcess(tmp_path, *flags) as second:
            assert (second.http, second.grpc) == (first.http, first.grpc)


@pytest.mark.slow
@pytest.mark.parametrize(("off", "on"), [("http", "grpc"), ("grpc", "http")])
def test_a_front_that_is_off_has_no_address(tmp_path: Path, off: str, on: str) -> None:
    write_model(tmp_path, "good", identity_config())
    module = {"http": httpclient, "grpc": grpcclient}[on]
    with ServerProcess(tmp_path, f"--allow-{off}=false") as server:
        assert getattr(server, off) == "" and {"http": "REST ", "grpc": "gRPC "}[off] not in server.log()
        with module.InferenceServerClient(getattr(server, on)) as client:
            assert client.is_model_ready("good")


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "sig"), [("http", signal.SIGTERM), ("grpc", signal.SIGINT)])
def test_open_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, sig: signal.Signals
) -> None:
    gate = Gate(tmp_path, monkeypatch, protocol)
    gate.server.process.send_signal(sig)
    until(lambda: not listening(gate.address), "it refuses connections")
    assert gate.answers == []
    gate.open()
    gate.thread.join(300)
    assert gate.answers == [2.5]
    assert gate.server.process.wait(60) == 0
    assert (tmp_path / "finalized").exists()
    gate.close()
    assert "] stopping: 1 request under way\n" in gate.server.log() and "] stopped\n" in gate.server.log()


@pytest.mark.slow
def test_the_exit_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tmp_path, monkeypatch, "http", "--exit-timeout-secs=0.5")
    gate.server.process.send_signal(signal.SIGTERM)
    assert gate.server.process.wait(60) == 1
    gate.close()
    assert isinstance(gate.answers[0], Exception)
    assert "exit timeout expired" in gate.server.log()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["import", "initialize"])
def test_a_signal_while_a_model_loads_for_ever(tmp_path: Path, where: str) -> None:
    folder = "open(os.path.join(os.environ['GATE_FOLDER'], 'entered'), 'w').close()"
    hang = f"{folder}\n    threading.Event().wait()"
    at_import = "if True:\n    " + hang if where == "import" else ""
    at_start = "import os, threading\n  if True:\n    " + hang if where == "initialize" else "pass"
    code = f"import os, threading\n{at_import}\nclass TritonPythonModel:\n def initialize(self, args):\n  {at_start}\n"
    code += " def execute(self, requests): return []\n"
    write_model(tmp_path / "models", "slow", 'backend: "python"', {"1/model.py": code})
    command = [sys.executable, "-m", "neptrio", f"--model-repository={tmp_path / 'models'}", "--http-port=0"]
    process = subprocess.Popen(
        [
            *command,
            "--grpc-port=0",
            "--metrics-port=0",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
        ],
        env={**os.environ, "GATE_FOLDER": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    until((tmp_path / "entered").exists, "the model loads")
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_second_signal_exits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tmp_path, monkeypatch, "grpc", "--exit-timeout-secs=600")
    gate.server.process.send_signal(signal.SIGINT)
    until(lambda: not listening(gate.address), "it refuses connections")
    with pytest.raises(subprocess.TimeoutExpired):
        gate.server.process.wait(0.2)
    gate.server.process.send_signal(signal.SIGINT)
    assert gate.server.process.wait(60) == -signal.SIGINT
    gate.close()
