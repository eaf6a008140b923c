"""What a model's process prints becomes records of the log: one per line, one per traceback."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio.backends.python.printed_lines import Records, records
from tests.backends.python.models import python_model
from tests.support.server import ServerProcess, tracebacks


def a_traceback(chained: bool = False) -> str:
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            if chained:
                raise ValueError("outer")  # noqa: B904  # chained by the handling alone
            raise
    except Exception:
        return traceback.format_exc().rstrip("\n")


def made_of(text: str) -> list[str]:
    kept = Records()
    return [*(one for line in text.split("\n") for one in kept.line(line)), *kept.end()]


@pytest.mark.parametrize("chained", [False, True])
def test_a_traceback_is_one_record(chained: bool) -> None:
    told = a_traceback(chained)
    assert told.count("Traceback") == 1 + chained
    assert made_of(f"before\n{told}\nafter\n{told}\n{told}") == ["before", told, "after", told, told]


def test_what_a_thread_dies_of_is_one_record() -> None:
    told = f"Exception in thread Thread-1 (run):\n{a_traceback()}"
    assert made_of(f"{told}\nafter\n  indented\n\nlast") == [told, "after", "  indented", "", "last"]
    assert made_of("Exception in thread without a traceback\nafter") == [
        "Exception in thread without a traceback",
        "after",
    ]


def test_a_fatal_error_is_one_record() -> None:
    told = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x0 (most recent call first):\n  File "x", line 1 in f'
    assert made_of(told) == [told]


def test_a_traceback_without_an_end_ends_somewhere() -> None:
    lines = ["Traceback (most recent call last):", *(f"  line {i}" for i in range(5000))]
    made = made_of("\n".join(lines))
    assert len(made[0].split("\n")) == 1000 and len(made) == 4002


def test_a_pipe_is_read_to_its_end() -> None:
    reads, writes = os.pipe()
    told = a_traceback()
    with open(writes, "wb") as pipe:
        pipe.write(f"one\n\n{told}\ntwo ".encode() + b"\xff\n" + b"x" * 30000 + b"\nlast")
    with open(reads, "rb") as pipe:
        found = list(records(pipe.fileno()))
    assert found == [
        ("one", ["one"]),
        ("", [""]),
        (told, told.split("\n")),
        ("two \ufffd", ["two \ufffd"]),
        ("x" * 30000, ["x" * 30000]),
        ("last", ["last"]),
    ]


def test_an_open_traceback_is_told_when_nothing_follows() -> None:
    reads, writes = os.pipe()
    told = a_traceback()
    with open(reads, "rb") as pipe, open(writes, "wb", buffering=0) as other:
        other.write(told.encode() + b"\n")
        assert next(records(pipe.fileno())) == (told, told.split("\n"))


FAILS = """
import sys, threading

class TritonPythonModel:
    def execute(self, requests):
        thread = threading.Thread(target=self.fail)
        thread.start()
        thread.join()
        sys.stderr.write("after the thread\\n")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]

    def fail(self):
        raise KeyError("in a thread of the model")
"""


@pytest.mark.slow
def test_the_log_has_it_in_one_record(tmp_path: Path) -> None:
    python_model(tmp_path, "fails", FAILS)
    with ServerProcess(tmp_path, failures="KeyError: 'in a thread of the model'") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            tensor = httpclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.zeros(1, np.float32))
            client.infer("fails", [tensor])
        server.until_logged("after the thread")
        (told,) = tracebacks(server.log())
        assert "Exception in thread" in told and "KeyError: 'in a thread of the model'" in told
