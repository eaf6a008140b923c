"""In a terminal Ctrl-C is for the server alone, and whoever is in its session may write there."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated
from tests.support.latch import Latch
from tests.support.refusing import refuses
from tests.support.server import ServerProcess
from tests.support.waiting import until

# Stands before the server's command line: gives it a terminal that stops writers of other process groups, where SIGUSR1 presses
# Ctrl-C, and passes on what is written there.
TERMINAL = """#!{python}
import os, pty, signal, sys, termios
server, terminal = pty.fork()
if server == 0:
    modes = termios.tcgetattr(0)
    modes[1] &= ~termios.OPOST
    modes[3] = modes[3] & ~termios.ECHO | termios.TOSTOP
    termios.tcsetattr(0, termios.TCSANOW, modes)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGUSR1, lambda *_: os.write(terminal, b"\\x03"))
signal.signal(signal.SIGTERM, lambda *_: os.kill(server, signal.SIGTERM))
try:
    while written := os.read(terminal, 65536):
        os.write(2, written)
except OSError:
    pass  # nobody has the terminal open any more
sys.exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
"""
WAITS = """
import pathlib
class TritonPythonModel:
    def execute(self, requests):
        print("executing", flush=True)
        pathlib.Path(LATCH).read_text()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
                for r in requests]
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--frontends=1", "--log-verbose=2")], ids=["alone", "a front end"])
def test_ctrl_c_lets_a_request_under_way_finish(tmp_path: Path, flags: tuple[str, ...]) -> None:
    terminal = tmp_path / "terminal"
    terminal.write_text(TERMINAL.format(python=sys.executable))
    terminal.chmod(0o755)
    latch = Latch(tmp_path / "latch")
    models = tmp_path / "models"
    isolated(models, "waits", WAITS.replace("LATCH", repr(str(latch.path))), config())
    answers: list[Any] = []

    def ask(address: str) -> None:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.array([7], np.float32))
        with httpclient.InferenceServerClient(address, network_timeout=60) as client:
            answers.append(client.infer("waits", [tensor]).as_numpy("OUT").tolist())

    with latch, ServerProcess(models, *flags, python=str(terminal)) as server:
        asked = threading.Thread(target=ask, args=(server.http,))
        asked.start()
        server.until_logged("executing")
        server.process.send_signal(signal.SIGUSR1)
        until(lambda: refuses(server.http), "the server is stopping")
        latch.open()
        asked.join()
        assert answers == [[7.0]]
        assert server.ended() == 0
