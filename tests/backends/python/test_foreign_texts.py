"""A model's exception says what it likes of itself, or nothing: its request is answered with clear text all the same."""

from __future__ import annotations

import ast
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import neptrio
from neptrio import errors, foreign
from neptrio.logs import LineFormat
from tests.backends.python.models import config, isolated
from tests.support.http import Http1
from tests.support.server import ServerProcess
from tests.support.waiting import until
from triton_python_backend_utils import _execute, _foreign

MODELS_RUN_IN = ("backends/python", "embedded", "execution", "repository")
DECOUPLED = config(extra="model_transaction_policy { decoupled: true }")
# IN says what happens: 0 nothing, 1 and 2 no text, 3 a text that is not Unicode, 4 and 5 a response with such an error
RAISES = """
import numpy as np

class Silent(Exception):
    def __str__(self):
        raise ValueError("no")
    __repr__ = __str__

class Leaving(Exception):
    def __str__(self):
        raise SystemExit(1)
    __repr__ = __str__

def answer(request):
    how = int(request.inputs()[0].as_numpy()[0])
    if how == 1:
        raise Silent()
    if how == 2:
        raise Leaving()
    if how == 3:
        raise ValueError("half \\ud800 and byte \\udc80")
    if how == 4:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("half \\ud800 and byte \\udc80"))
    if how == 5:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(Silent()))
    if how == 6:
        pb_utils.Logger.log_info("logged \\ud800")
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))])
"""
SYNC = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(r) for r in requests]
"""
ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        return [answer(r) for r in requests]

    async def finalize(self):
        raise Silent()
"""
SENDER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(answer(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        raise Silent()
"""
IN_TURN = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        raise Silent()

    def initialize(self, args):
        raise Silent()

    def execute(self, requests):
        pass
"""
AUTO = IN_TURN.replace("c):\n        raise Silent()", "c):\n        return c")
HEALTH = (
    SYNC
    + """
    def is_ready(self):
        raise Leaving()
"""
)
OURS = """
import neptrio

class Mine(neptrio.TritonError):
    code = neptrio.Code.NOT_FOUND

    def __str__(self):
        raise ValueError("no")

class TritonPythonModel:
    def execute(self, requests):
        raise Mine("not here")
"""
MODELS = {"sync": SYNC, "async": ASYNC, "sender": SENDER, "health": HEALTH}
WAYS = {"process": "process", "none": "none", "environment": sys.prefix}
NAMES = [f"{model}_{way}" for model in ("sync", "async", "sender") for way in WAYS]
SAYS = {
    1: "Silent: <the text of this Silent cannot be made: ValueError>",
    2: "Leaving: <the text of this Leaving cannot be made: SystemExit>",
    3: r"ValueError: half \ud800 and byte \udc80",
    4: r"half \ud800 and byte \udc80",
    5: "TypeError: message of TritonError must be a str, got Silent",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for way in WAYS:
        for model, code in MODELS.items():
            text = DECOUPLED if model == "sender" else config()
            isolated(repository, f"{model}_{way}", RAISES + code, text, way=WAYS[way])
        isolated(repository, f"initialize_{way}", RAISES + AUTO, way=WAYS[way])
        isolated(repository, f"completes_{way}", RAISES + IN_TURN, way=WAYS[way])
    isolated(repository, "ours_none", OURS, way="none")
    with ServerProcess(repository, "--exit-on-error=false", failures="in is_ready") as running:
        yield running


def told(server: ServerProcess, name: str, how: int) -> str:
    """What a gRPC client is told; "" where it got an answer."""
    given = grpcclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([how], np.float32))
    got: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: got.append(error or result), stream_timeout=20)
        client.async_stream_infer(name, [given])
        until(lambda: bool(got))
        client.stop_stream()
    return str(got[0].message()) if isinstance(got[0], InferenceServerException) else ""


@pytest.mark.parametrize("how", SAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_fails_without_a_text_answers(server: ServerProcess, name: str, how: int) -> None:
    assert SAYS[how] in told(server, name, how)
    assert told(server, name, 0) == ""


@pytest.mark.parametrize("how", SAYS)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sender")])
def test_its_error_is_valid_json(server: ServerProcess, name: str, how: int) -> None:
    body = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[%d]}]}' % how
    with Http1(server.http) as client:
        reply = client.request("POST", f"/v2/models/{name}/infer", body)
    assert reply.status == 500
    assert SAYS[how] in json.loads(reply.body.decode())["error"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_logs_what_is_no_unicode(server: ServerProcess, name: str) -> None:
    before = server.log().count(r"logged \ud800")
    assert told(server, name, 6) == ""
    server.until_logged(r"logged \ud800", before + 1)


def test_an_error_of_ours_that_a_model_has_derived(server: ServerProcess) -> None:
    assert "<the text of this Mine cannot be made: ValueError>" in told(server, "ours_none", 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_whose_readiness_has_no_text_is_not_ready(server: ServerProcess, way: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert not client.is_model_ready(f"health_{way}")
        assert not client.is_model_ready(f"health_{way}")
    assert told(server, f"health_{way}", 0) == ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["initialize", "completes"])
def test_a_load_that_fails_without_a_text_says_why(server: ServerProcess, stage: str, way: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        (row,) = [r for r in client.get_model_repository_index() if r["name"] == f"{stage}_{way}"]
    assert SAYS[1] in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", [ASYNC, SENDER], ids=["async", "sync"])
def test_a_finalize_that_fails_without_a_text_ends(tmp_path: Path, code: str, way: str) -> None:
    isolated(tmp_path, "one", RAISES + code, DECOUPLED if code is SENDER else config(), way=WAYS[way])
    with ServerProcess(tmp_path) as server:
        assert server.stop() == 0
        server.until_logged("this Silent cannot be made")


# ---------------------------------------------------------------- functions of the embedded server


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


class Mine(neptrio.TritonError):
    code = neptrio.Code.NOT_FOUND

    def __str__(self) -> str:
        raise ValueError("no")


RAISED = {"silent": Silent, "half": lambda: ValueError("half \ud800"), "mine": lambda: Mine("not here")}


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Nothing is logged: pytest keeps it for its report, and cannot pass half of a pair on from one of its processes to another."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("unlogged")
def test_functions_that_fail_without_a_text() -> None:
    app = neptrio.Server()

    @app.function
    def plain(how: str) -> str:
        raise RAISED[how]()

    @app.function
    async def waits(how: str) -> str:
        raise RAISED[how]()

    with app.running() as running:
        for name in ("plain", "waits"):
            for how, code, text in (
                (
                    "silent",
                    neptrio.Code.INTERNAL,
                    "Silent: <the text of this Silent cannot be made: ValueError>",
                ),
                ("half", neptrio.Code.INTERNAL, r"ValueError: half \ud800"),
                ("mine", neptrio.Code.NOT_FOUND, "<the text of this Mine cannot be made: ValueError>"),
            ):
                with pytest.raises(neptrio.TritonError) as caught:
                    running.model(name).infer({"how": [how]})
                assert (caught.value.code, caught.value.message) == (code, text)


# ---------------------------------------------------------------- the functions


class Text(str):
    def __str__(self) -> str:
        return self

    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        raise ValueError("no")


class Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no")


class Unnamed(Exception, metaclass=Meta):
    __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


@pytest.mark.parametrize("module", [foreign, _foreign])
def test_texts(module: Any) -> None:
    assert module.text_of(5) == "5"
    assert module.text_of(ValueError("é")) == "é"
    assert type(module.text_of(Text("plain"))) is str
    assert module.text_of(Text("x\udcff")) == r"x\udcff"
    assert module.summary(Unnamed("why")) == "Unnamed: why"
    assert module.summary(KeyError("k")) == "KeyError: 'k'"
    assert len(module.text_of("x" * (2 << 20))) == module.LONGEST
    assert _execute.failure_text("m", Unnamed("why")).endswith("message: Unnamed: why")


def test_an_error_whose_fields_are_not_what_they_are_taken_for() -> None:
    error: Any = errors.InvalidArgument("text")
    error.message, error.code, error.reason = Silent(), 5, None
    assert errors.settled(error) is error
    assert str(error) == "<the text of this Silent cannot be made: ValueError>"
    assert (error.code, error.reason) == (errors.Code.INTERNAL, errors.Reason.OTHER)


def test_a_record_whose_argument_has_no_text_is_written() -> None:
    record = logging.LogRecord("neptrio", logging.ERROR, "a.py", 1, "%s failed", (Silent(),), None)
    assert "<the text of this Silent cannot be made: ValueError> failed" in LineFormat(False).format(record)


def worded_elsewhere(path: Path) -> list[str]:
    """Where a module words an exception of any class (`except Exception as error`) by itself."""
    found = []
    for handler in ast.walk(ast.parse(path.read_text())):
        if isinstance(handler, ast.ExceptHandler) and handler.name and isinstance(handler.type, ast.Name):
            if handler.type.id not in ("Exception", "BaseException"):
                continue
            for node in ast.walk(handler):
                worded: Any = node.value if isinstance(node, ast.FormattedValue) else None
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    worded = node.args[0] if node.func.id in ("str", "repr") else None
                if isinstance(worded, ast.Name) and worded.id == handler.name:
                    found.append(f"{path}:{worded.lineno}")
    return found


@pytest.mark.slow
def test_nobody_else_words_what_a_model_raises() -> None:
    source = Path(neptrio.__file__).parents[1]
    folders = [source / "triton_python_backend_utils", *(source / "neptrio" / at for at in MODELS_RUN_IN)]
    assert [
        row for folder in folders for path in folder.rglob("*.py") for row in worded_elsewhere(path)
    ] == []
