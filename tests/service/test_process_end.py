"""The end of the server's process beside threads that go on: in good order, and not by an abort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repository import write_model
from tests.support.server import ServerProcess, without_front_ends

# Pydantic's core is written in Rust and calls back into Python: whatever unwinds such a frame is caught there. It comes with
# what checks the OpenAPI description.
BUSY = """
import atexit, threading, time
from pydantic_core import SchemaValidator, core_schema

WRITES = "{file}"

def told(text):
    with open(WRITES, "a") as file:
        file.write(text + chr(10))

def switch(value):
    for _ in range(1000):
        time.sleep(0)  # asks for the interpreter again and again, inside of the validator
    return value

def busy():
    validator = SchemaValidator(core_schema.no_info_plain_validator_function(switch))
    while True:
        validator.validate_python(1)

def last():
    threading.main_thread().join()  # ends when the interpreter begins to wait for threads
    told("thread")

class TritonPythonModel:
    def initialize(self, args):
        atexit.register(told, "atexit")
        threading.Thread(target=busy, daemon=True).start()
        threading.Thread(target=last, daemon=False).start()

    def execute(self, requests):
        return []

    def finalize(self):
        print("printed at the end")  # no newline is flushed before
        told("finalize")
"""
CONFIG = """
backend: "python" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "isolation" value { string_value: "none" } }
"""


@pytest.mark.slow
@without_front_ends  # it is the process with the models that this is about
def test_threads_that_go_on_do_not_end_the_server_with_an_abort(tmp_path: Path) -> None:
    file = tmp_path / "told"
    write_model(tmp_path / "models", "busy", CONFIG, {"1/model.py": BUSY.format(file=file)})
    for _ in range(3):
        file.unlink(missing_ok=True)
        server = ServerProcess(tmp_path / "models")
        assert server.stop() == 0, server.log()
        assert file.read_text().split() == ["finalize", "thread", "atexit"]
