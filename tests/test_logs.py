"""Lines of the log and the flags that shape them."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from onnx import helper

from neptrio.logs import (
    BURST,
    HELD_BYTES,
    LONGEST,
    MODEL_BURST,
    MODEL_PER_SECOND,
    PLACES,
    REFILL_SECONDS,
    FloodFilter,
    LevelFilter,
    LineFormat,
    LineHandler,
    LogFile,
    start_logging,
)
from neptrio.settings import Settings
from tests.backends.python.models import config, isolated, python_model
from tests.support import onnx_models
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def record(level: int) -> logging.LogRecord:
    return logging.LogRecord("neptrio.x", level, "file.py", 12, "hello %s", ("you",), None)


def test_formats() -> None:
    assert re.fullmatch(
        r"W\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ file\.py:12\] hello you",
        LineFormat(False).format(record(logging.WARNING)),
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ file\.py:12\] hello you",
        LineFormat(True).format(record(logging.INFO)),
    )


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (logging.DEBUG, "I"),
        (logging.INFO, "I"),
        (logging.WARNING, "W"),
        (logging.ERROR, "E"),
        (logging.CRITICAL, "E"),
    ],
)
def test_letters(level: int, letter: str) -> None:
    assert LineFormat(False).format(record(level)).startswith(letter)
    assert f"Z {letter} " in LineFormat(True).format(record(level))


SAYS = """
class TritonPythonModel:
    def initialize(self, args):
        for say in ("verbose", "info", "warn", "error"):
            getattr(pb_utils.Logger, "log_" + say)("said " + say)

    def execute(self, requests):
        return []
"""


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_a_log_knows_three_levels(tmp_path: Path, apart: bool) -> None:
    """What is verbose is I, of the server and of models in any process."""
    (isolated if apart else python_model)(tmp_path, "says", SAYS, config("IN:TYPE_FP32:1", "OUT:TYPE_FP32:1"))
    with ServerProcess(tmp_path, "--log-verbose=1") as server:
        server.until_logged("said error")
        log = server.log()
    said = {word: letter for letter, word in re.findall(r"^([A-Z])\d{4} .*said (\w+)$", log, re.M)}
    assert said == {"verbose": "I", "info": "I", "warn": "W", "error": "E"}
    assert set(re.findall(r"^([A-Z])\d{4} \d\d:", log, re.M)) == {"I", "W", "E"}


def test_levels_can_be_off() -> None:
    every = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
    off = LevelFilter(Settings(log_info=False, log_warning=False))
    assert [level for level in every if off.filter(record(level))] == [logging.ERROR]
    verbose = LevelFilter(Settings(log_verbose=1, log_error=False))
    assert [level for level in every if verbose.filter(record(level))] == [10, 20, 30]


def test_log_file(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "bad", 'backend: "nonesuch"')
    write_model(tmp_path / "models", "good", identity_config())
    log = tmp_path / "server.log"
    with ServerProcess(
        tmp_path / "models", "--exit-on-error=false", f"--log-file={log}", "--log-format=ISO8601"
    ) as server:
        assert "Z E " not in server.log()
    assert re.search(r"^\S+Z E \d+ \S+\] load failed for model 'bad'", log.read_text(), re.M)


def at(second: float, subject: str = "", line: int = 1, level: int = logging.ERROR) -> logging.LogRecord:
    """A record of a certain time."""
    made = logging.LogRecord("neptrio.x", level, "file.py", line, "failed: %s", ("why",), None)
    made.created = second
    made.subject = subject
    return made


def test_what_one_place_says_of_one_subject_is_bounded() -> None:
    flood = FloodFilter()
    passed = [flood.filter(at(100 + n / 1000, "noisy")) for n in range(1000)]
    assert passed == [True] * int(BURST) + [False] * (1000 - int(BURST))
    # other subjects, other places and verbose records are not concerned
    assert flood.filter(at(101, "quiet"))
    assert flood.filter(at(101, "noisy", line=2))
    assert all(flood.filter(at(101, "noisy", level=logging.DEBUG)) for _ in range(100))
    # one more after a while, which tells of those that were left out
    assert not flood.filter(at(99 + REFILL_SECONDS, "noisy"))
    record = at(102 + REFILL_SECONDS, "noisy")
    assert flood.filter(record)
    assert (
        LineFormat(False)
        .format(record)
        .endswith("failed: why (981 records like this were left out before it)")
    )
    assert not flood.filter(at(102 + REFILL_SECONDS, "noisy"))
    # a clock that was set back gives nothing and takes nothing
    assert not flood.filter(at(5, "noisy"))
    # after a long silence there is the whole burst again
    late = [flood.filter(at(10_000, "noisy")) for _ in range(100)]
    assert sum(late) == BURST


@pytest.mark.slow
def test_what_a_model_says_itself_is_bounded_far_above_what_is_read() -> None:
    flood = FloodFilter()

    def said(second: float, name: str = "chatty") -> logging.LogRecord:
        made = logging.LogRecord(f"neptrio.model.{name}", logging.INFO, "m.py", 1, "%s", ("hello",), None)
        made.created = second
        return made

    burst, each_second = int(MODEL_BURST), int(MODEL_PER_SECOND)
    assert [flood.filter(said(100)) for _ in range(burst + 5)] == [True] * burst + [False] * 5
    assert flood.filter(said(100, "another"))
    later = [said(101) for _ in range(each_second + 1)]
    assert [flood.filter(one) for one in later] == [True] * each_second + [False]
    assert LineFormat(False).format(later[0]).endswith("hello (5 records like this were left out before it)")
    assert LineFormat(False).format(later[1]).endswith("hello")


def test_every_model_may_be_spoken_of() -> None:
    flood = FloodFilter()
    for n in range(10 * int(BURST)):
        named = logging.LogRecord("a", logging.WARNING, "a.py", 1, "model '%s': %s", (f"m{n}", "why"), None)
        assert flood.filter(named)


def test_text_of_anybodys_making_opens_no_place_of_its_own() -> None:
    flood = FloodFilter()
    made = [logging.LogRecord("other", logging.ERROR, "o.py", 1, f"bad {n}", (), None) for n in range(100)]
    for one in made:
        one.created = 7
    assert sum(flood.filter(one) for one in made) == BURST


def test_the_places_remembered_are_bounded() -> None:
    flood = FloodFilter()
    for n in range(3 * PLACES):
        assert flood.filter(at(1, f"model {n}"))
    assert len(flood._places) == PLACES


def test_what_is_logged_in_the_middle_of_a_record_passes() -> None:
    """The collector may run anywhere, and with it a finalizer that logs, such as that of a task of asyncio."""
    flood, passed = FloodFilter(), []

    class Subject(str):
        """Does while the filter looks its record up what a finalizer might do then."""

        def __hash__(self) -> int:
            passed.append(flood.filter(record(logging.INFO)))
            return super().__hash__()

    def log() -> None:
        outer = record(logging.INFO)
        outer.subject = Subject("a subject")
        passed.append(flood.filter(outer))

    logging_thread = threading.Thread(target=log, daemon=True)
    logging_thread.start()
    logging_thread.join(60)
    assert len(passed) > 1 and all(passed)


def test_a_long_record_loses_its_middle() -> None:
    record = logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "begin %s end", ("x" * 10**6,), None)
    text = LineFormat(False).format(record)
    assert len(text) < LONGEST + 100
    assert (
        "] begin xxx" in text
        and text.endswith("xxx end")
        and re.search(r"\(98\d{4} characters left out\)", text)
    )


def test_text_that_is_not_unicode_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    level = root.level
    handler = start_logging(Settings(log_file=str(tmp_path / "log")))
    try:
        handler.handle(logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "%s", ("a\udcffb",), None))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
    assert (tmp_path / "log").read_text().endswith("] a\\udcffb\n")
    assert capsys.readouterr().err == ""


FAILS = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("this model always fails")
"""
AWAITS = FAILS.replace("def execute", "async def execute")
RESHAPE = onnx_models.model(
    [helper.make_node("Reshape", ["X", "COUNT"], ["Y"])],
    [onnx_models.tensor("X", "FP32", [4]), onnx_models.tensor("COUNT", "INT64", [2])],
    [onnx_models.tensor("Y", "FP32", [None, None])],
)
X = {"name": "X", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
BAD = [X, {"name": "COUNT", "datatype": "INT64", "shape": [2], "data": [7, 8]}]


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [0, 1])
def test_failing_executions_are_logged_alike_and_not_without_end(tmp_path: Path, verbose: int) -> None:
    """Whatever the backend: the first failures of a model are told, a thousand do not fill the disk."""
    for name, api in (("onnx_c", "c"), ("onnx_python", "python")):
        parameter = f'parameters {{ key: "session_api" value {{ string_value: "{api}" }} }}'
        write_model(tmp_path, name, f'backend: "onnxruntime" {parameter}', {"1/model.onnx": RESHAPE})
    text = config("X:TYPE_FP32:4", "Y:TYPE_FP32:4")
    python_model(tmp_path, "python", FAILS, text)
    python_model(tmp_path, "awaits", AWAITS, text)
    isolated(tmp_path, "apart", FAILS, text)
    models = ("onnx_c", "onnx_python", "python", "awaits", "apart")
    with ServerProcess(tmp_path, f"--log-verbose={verbose}", failures="this model always fails") as server:
        begun = len(server.log())
        with Http1(server.http) as client:
            for name in models:
                body = json.dumps({"inputs": BAD if name.startswith("onnx") else [X]}).encode()
                for _ in range(200):
                    reply = client.request("POST", f"/v2/models/{name}/infer", body)
                    assert reply.status == 500, reply.body
                assert name in json.loads(reply.body)["error"]
    log = server.log()[begun:]  # to its end: lines may come later than answers
    errors = [line for line in log.splitlines() if re.match(r"E\d{4} ", line)]
    for name in models:
        # each is a record of its own; slow machines may have earned a few more
        told = [line for line in errors if re.search(rf"'{name}(_0)?'", line)]
        assert BURST <= len(told) < 100, (name, len(told))
    assert len([line for line in errors if "onnx runtime error" not in line and "Failed to" not in line]) == 0
    own = len(re.findall(r"^I.*\] onnxruntime ", log, re.M))
    assert own == 200 * verbose, "what the library says itself is for those who ask"


# ---------------------------------------------------------------- records that cannot be forged


def test_what_others_wrote_begins_no_record() -> None:
    forged = "E1121 00:31:38.123456 4711 x.py:1] the disk is full"
    for end in ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"):
        made = logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "%s", (f"oh{end}{forged}",), None)
        for iso in (False, True):
            lines = LineFormat(iso).format(made).splitlines()
            assert not any(line.startswith("E1121 00:31") for line in lines[1:])
            assert all(line.startswith("    ") for line in lines[1:])
    terminal = logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "a\x1b[2Jb\tc", (), None)
    assert LineFormat(False).format(terminal).endswith("] a\\x1b[2Jb\tc")


def test_an_exception_begins_no_record() -> None:
    try:
        raise ValueError("a\nE1121 00:31:38.123456 4711 x.py:1] forged")
    except ValueError:
        made = logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    first, *others = LineFormat(False).format(made).splitlines()
    assert first.endswith("] failed")
    assert "    Traceback (most recent call last):" in others
    assert all(line.startswith("    ") for line in others)


def test_a_long_record_that_lost_its_middle_begins_no_other() -> None:
    text = "x\n" * LONGEST
    made = logging.LogRecord("neptrio.x", logging.ERROR, "f.py", 1, "%s", (text,), None)
    assert all(line.startswith("    ") for line in LineFormat(False).format(made).splitlines()[1:])


# ---------------------------------------------------------------- a reader that does not read


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, os.fdopen(read) as reader:
        handler = LineHandler(stream)
        handler.setFormatter(logging.Formatter("%(message)s"))
        for i in range(40_000):  # more than pipe and queue hold; a handler that waits never comes to the end
            handler.emit(logging.LogRecord("n", logging.INFO, "f.py", 1, f"line {i} " + "x" * 60, (), None))
        held = handler.statistics()
        assert held.left_out > 0
        assert 0 < held.bytes <= HELD_BYTES
        lines = []
        for line in reader:
            lines.append(line)
            if "records were left out" in line:
                break
        numbers = [int(line.split()[1]) for line in lines[:-1]]
        assert numbers == list(
            range(len(numbers))
        )  # in order, whole, and none lost before the first that was
        assert len(numbers) + int(lines[-1].split()[1]) == 40_000
        handler.settle(60)
        handler.emit(logging.LogRecord("n", logging.INFO, "f.py", 1, "again", (), None))
        assert reader.readline() == "again\n"


TALKATIVE = """
class TritonPythonModel:
    def execute(self, requests):
        for i in range(3000):
            pb_utils.Logger.log_info("x" * 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.slow
def test_a_server_answers_while_nobody_reads_its_log(tmp_path: Path) -> None:
    python_model(tmp_path, "talkative", TALKATIVE, config("IN:TYPE_INT32:1", "OUT:TYPE_INT32:1"))
    read, write = os.pipe()
    flags = ["--http-address=127.0.0.1", "--http-port=0", "--allow-grpc=false", "--allow-metrics=false"]
    command = [sys.executable, "-m", "neptrio", f"--model-repository={tmp_path}", *flags]
    process = subprocess.Popen(command, stderr=write)
    os.close(write)
    with os.fdopen(read) as log:
        text = ""
        while not text.endswith("serving\n"):
            text += log.readline()
        found = re.search(r"REST +on http://(\S+)", text)
        assert found is not None
        inputs = [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]
        with Http1(found[1]) as client:  # three megabytes are logged; a pipe holds 64 KiB
            body = json.dumps({"inputs": inputs}).encode()
            assert client.request("POST", "/v2/models/talkative/infer", body).status == 200
            assert client.request("GET", "/v2/health/ready").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_sighup_opens_the_log_file_again_and_ends_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    log = tmp_path / "log"
    with ServerProcess(tmp_path / "models", f"--log-file={log}", "--log-verbose=1") as server:
        log.rename(tmp_path / "old")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: log.exists() and "was opened again" in log.read_text(), "the log file is there again")
        with Http1(server.http) as client:
            assert client.request("GET", "/v2/health/ready").status == 200
    with ServerProcess(tmp_path / "models") as server:
        server.process.send_signal(signal.SIGHUP)
        server.until_logged("SIGHUP: there is nothing to read again")
        with Http1(server.http) as client:
            assert client.request("GET", "/v2/health/ready").status == 200


def limit_files(size: int) -> None:
    """This process may write files of up to so many bytes, as on a disk that is about to be full; -1: of any size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else hard, hard))


def test_a_log_file_that_cannot_be_written_is_told_of_once_and_loses_whole_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    instead = logging.StreamHandler()
    instead.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    handler = LogFile(str(tmp_path / "log"), instead)
    handler.setFormatter(logging.Formatter("%(message)s"))

    def log(text: str) -> None:
        handler.handle(logging.LogRecord("n", logging.INFO, "f.py", 1, text, (), None))

    log("first")
    limit_files(9)
    try:
        for text in ("second", "third", "fourth"):
            log(text)
    finally:
        limit_files(-1)
    log("fifth")
    handler.close()
    assert (tmp_path / "log").read_text().splitlines() == [
        "first",
        "sec",
        "    ... 3 records were left out: they could not be written ...",
        "fifth",
    ]
    assert told == [
        f"the log file '{tmp_path}/log' cannot be written: File too large; what is logged is lost meanwhile"
    ]
    assert capsys.readouterr().err == ""
