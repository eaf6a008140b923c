"""Threads that share the interpreter with the loop let it have its lock soon."""

from __future__ import annotations

from pathlib import Path

from neptrio.loop.interpreter_lock import SWITCH_SECONDS
from tests.backends.python.models import isolated
from tests.support.server import ServerProcess

TELLS = """
import sys

class TritonPythonModel:
    def initialize(self, args):
        print(f"{args['model_name']} switches after {sys.getswitchinterval()} s", file=sys.stderr, flush=True)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_who_shares_the_interpreter_lets_go_of_it_soon(tmp_path: Path) -> None:
    isolated(tmp_path, "inside", TELLS, way="none")
    isolated(tmp_path, "outside", TELLS, way="process")
    with ServerProcess(tmp_path) as server:
        server.until_logged(f"inside switches after {SWITCH_SECONDS} s")
        server.until_logged("outside switches after 0.005 s")
