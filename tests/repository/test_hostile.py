"""Hostile input: names, files, links, configurations and models that mean no good.

Whatever comes, a load call returns, what serves goes on serving, and the shutdown is not held up.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from neptrio.repository import model_builder
from neptrio.repository.model_builder import ModelBuilder
from neptrio.repository.override import LoadParameters
from neptrio.repository.repositories import Repositories
from neptrio.settings import Settings
from tests.support import onnx_models
from tests.support.configs import configurations
from tests.support.control import CONFIG, infer, load, post, refused, rows
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

EXAMPLES = int(os.environ.get("NEPTRIO_FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PYTHON = identity_config().replace('"identity"', '"python"')
ISOLATED = ' parameters { key: "isolation" value { string_value: "process" } }'
STATUSES = (200, 400, 413, 500, 503)
LIMIT = 2 << 20
# whatever holds the shutdown up fails its test
FOR_EVER = "--exit-timeout-secs=3600"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that every test leaves as it was; at the end it stops as if nothing had been."""
    repository = tmp_path_factory.mktemp("hostile")
    write_model(repository, "m", identity_config())
    write_model(repository, "n", identity_config())
    temporary = tmp_path_factory.mktemp("temporary")
    flags = ("--model-control-mode=explicit", "--load-model=*", f"--http-max-input-size={LIMIT}", FOR_EVER)
    with ServerProcess(repository, *flags, env={**os.environ, "TMPDIR": str(temporary)}) as process:
        yield process
        assert process.stop() == 0
        assert list(temporary.glob("neptrio-*")) == []


def still_serves(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        infer(client)
        assert rows(client, "m") == [("1", "READY", "")]


@pytest.mark.parametrize(
    "name", ["%2e%2e", "..%2f..%2fetc", "m%2f..%2fn", "m%00", "a" * 300, "*", "~", "..."]
)
def test_names_are_names_of_folders(server: ServerProcess, name: str) -> None:
    assert "failed to poll from model repository" in refused(load(server, name), 500)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model(name)
        client.unload_model(name)
    still_serves(server)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty or only white space, got ''"),
        ("  \t\n", "empty or only white space, got '  \t\n'"),
        *(
            (name, "a path, expected")
            for name in (".", "..", "../etc", "/etc/passwd", "m/1", "m\\..\\n", "m\0")
        ),
    ],
)
def test_names_that_no_model_can_have(server: ServerProcess, name: str, reason: str) -> None:
    """They are refused before anything is looked for: by no model, and by no folder."""
    over_http = name in (".", "..", "m\\..\\n")  # others do not fit into a path, or not as they are
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for verb in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException) as info:
                verb(name)
            assert info.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert info.value.message().startswith(f"model name must not be {reason}")
        with pytest.raises(InferenceServerException, match="is not found"):  # as a Triton server
            infer(client, name)
    for verb in ("load", "unload") if over_http else ():
        text = refused(post(server, f"models/{name}/{verb}"), 400)
        assert text.startswith(f"model name must not be {reason}")
    still_serves(server)


@pytest.mark.parametrize(
    "key",
    [
        "../x",
        "1/../../x",
        "/../etc/x",
        "1//../../x",
        "",
        ".",
        "./",
        "1\\..\\x",
        "1/\0",
        "a" * 300,
        "1/" + "b" * 300,
    ],
)
def test_file_keys_stay_in_their_folder(server: ServerProcess, key: str) -> None:
    text = refused(load(server, "m", **{"config": json.dumps(CONFIG), f"file:{key}": encoded(b"x")}), 500)
    assert "failed to poll from model repository" in text
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("m", config=json.dumps(CONFIG), files={f"file:{key}": b"x"})
    still_serves(server)


def test_configured_files_stay_in_their_folder(server: ServerProcess) -> None:
    for changes in (
        {"default_model_filename": "../../../etc/passwd"},
        {"output": [{**CONFIG["output"][0], "label_filename": "/etc/passwd"}]},  # type: ignore[index]
    ):
        text = refused(load(server, "m", config=json.dumps({**CONFIG, **changes})), 400)
        assert "must stay within" in text
    still_serves(server)


def test_a_name_of_300_characters(server: ServerProcess) -> None:
    name = "n" * 300
    parameters = {"config": json.dumps(CONFIG), "file:1/x": encoded(b"x")}
    assert load(server, name, **parameters).status == 200
    with httpclient.InferenceServerClient(server.http) as client:
        infer(client, name)
        client.unload_model(name)
        with pytest.raises(InferenceServerException):
            infer(client, name)
    still_serves(server)


def test_broken_base64_is_400(server: ServerProcess) -> None:
    for broken in ("*", "AAA", "A A A A", "AAAA=", "AAAA====", "AB==CD==", "=", "é", "AAAA\n\n"):
        text = refused(load(server, "m", **{"config": json.dumps(CONFIG), "file:1/x": broken}), 400)
        assert "'file:1/x' is not valid base64" in text
    still_serves(server)


def test_an_override_over_the_limit_is_413(server: ServerProcess) -> None:
    body = {"parameters": {"config": json.dumps(CONFIG), "file:1/x": "A" * (LIMIT + 4)}}
    assert "exceeds the limit" in refused(post(server, "models/m/load", body), 413)
    with Http1(server.http) as http:  # no announced size
        http.send(
            b"POST /v2/repository/models/m/load HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(LIMIT // 0x10000 + 2):
                http.send(chunk)
        except OSError:
            pass  # answered and closed already
        assert http.read().status == 413
    fits = {"config": json.dumps(CONFIG), "file:1/x": "A" * (LIMIT - 2048)}
    assert load(server, "m", **fits).status == 200
    assert load(server, "m").status == 200
    still_serves(server)


@pytest.mark.slow
@FUZZ
@given(configurations({"max_batch_size": 8, "input": CONFIG["input"], "output": CONFIG["output"]}))
def test_a_load_with_any_configuration_returns(server: ServerProcess, config: dict[str, Any]) -> None:
    reply = load(server, "n", config=json.dumps(config))
    assert reply.status in STATUSES, reply.body
    if reply.status != 200:
        assert json.loads(reply.body)["error"]
    still_serves(server)
    checked = post(server, "models/n/check", {"parameters": {"config": json.dumps(config)}})
    assert checked.status == 200
    assert json.loads(checked.body)["ok"] == (reply.status == 200), (checked.body, reply.body)


HUGE = 2**31 - 1
STATE = {"input_name": "S", "output_name": "T", "data_type": "TYPE_INT64"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"instance_group": [{"count": HUGE, "kind": "KIND_CPU"}]}, "at most 1024 instances"),
        ({"instance_group": [{"count": 600}, {"count": 600}]}, "at most 1024 instances"),
        ({"sequence_batching": {"oldest": {"max_candidate_sequences": HUGE}}}, "max_candidate_sequences"),
        ({"sequence_batching": {}, "max_batch_size": HUGE}, "at most"),
        ({"sequence_batching": {"state": [{**STATE, "dims": [2**40]}]}}, "bytes"),
        ({"dynamic_batching": {"priority_levels": 2**40, "default_priority_level": 1}}, "priority_levels"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": str(2**64 - 1)}}, ""),
        (
            {
                "model_warmup": [
                    {
                        "name": "w",
                        "batch_size": 1,
                        "count": HUGE,
                        "inputs": {
                            f"INPUT{i}": {"data_type": "TYPE_INT32", "dims": [16], "zero_data": True}
                            for i in range(2)
                        },
                    }
                ]
            },
            "count",
        ),
    ],
)
def test_huge_numbers_are_refused_at_once(server: ServerProcess, changes: dict[str, Any], text: str) -> None:
    # a client that waits for no longer than a minute is answered
    reply = load(server, "n", config=json.dumps({**CONFIG, **changes}))
    if text:
        assert text in refused(reply, 400)
    else:
        assert reply.status == 200
    still_serves(server)


@pytest.mark.slow
@FUZZ
@given(st.text() | st.from_regex(r"[{}\[\]\",:a-z0-9. -]{0,60}"))
def test_a_load_with_any_text_as_configuration_returns(server: ServerProcess, text: str) -> None:
    assert load(server, "n", config=text).status in STATUSES
    still_serves(server)


@pytest.mark.slow
@FUZZ
@given(st.data())
def test_a_load_with_damaged_files_returns(server: ServerProcess, data: st.DataObject) -> None:
    content = bytearray(onnx_models.add_sub())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    cut = bytes(content[: data.draw(st.integers(0, len(content)))]) if data.draw(st.booleans()) else content
    parameters = {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": encoded(bytes(cut))}
    reply = load(server, "o", **parameters)
    assert reply.status in STATUSES, reply.body
    assert post(server, "models/o/check", {"parameters": parameters}).status == 200
    code = b"class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n"
    at = data.draw(st.integers(0, len(code)))
    damaged = code[:at] + data.draw(st.binary(max_size=8)) + code[at + data.draw(st.integers(0, 8)) :]
    config = json.dumps({**CONFIG, "backend": "python"})
    reply = load(server, "p", **{"config": config, "file:1/model.py": encoded(damaged)})
    assert reply.status in STATUSES, reply.body
    still_serves(server)


# ------------------------------------------------------------------------------ folders


@pytest.mark.slow
def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    repository = tmp_path / "repository"
    for name in ("m", "file", "folder"):
        write_model(repository, name, identity_config())
    write_model(tmp_path / "elsewhere", "whole", identity_config())
    os.symlink(tmp_path / "elsewhere" / "secret", repository / "file" / "1" / "weights")
    os.symlink("/", repository / "folder" / "root")
    os.symlink(tmp_path / "elsewhere" / "whole", repository / "whole")
    os.symlink(repository / "m" / "config.pbtxt", repository / "m" / "1" / "inside")
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with ServerProcess(repository, *flags) as server:
        for name, link in (("file", "file/1/weights"), ("folder", "folder/root"), ("whole", "whole")):
            text = refused(load(server, name), 500)
            assert f"/{link}: the symbolic link leads out of the repository, to " in text
            with httpclient.InferenceServerClient(server.http) as client:
                assert "leads out" in rows(client, name)[0][2]
        still_serves(server)
    with ServerProcess(repository, *flags, "--follow-external-links=true") as server:
        for name in ("file", "whole"):
            assert load(server, name).status == 200


WAITING = """
class TritonPythonModel:
    def initialize(self, args):
        with open({pipe!r}, "rb") as pipe:
            pipe.read()  # until the writer closes it
    def execute(self, requests):
        return [None for _ in requests]
"""


def writer(pipe: Path, writers: list[int]) -> bool:
    """Opens a pipe for writing if somebody reads it."""
    try:
        writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_folder_that_is_deleted_while_it_loads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    repository = tmp_path / "repository"
    folder = write_model(
        repository, "stuck", PYTHON, {"1/model.py": WAITING.format(pipe=str(tmp_path / "pipe"))}
    )
    write_model(repository, "m", identity_config())
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server:
        outcome: list[int] = []
        writers: list[int] = []
        thread = threading.Thread(target=lambda: outcome.append(load(server, "stuck").status))
        with httpclient.InferenceServerClient(server.http) as client:
            thread.start()
            until(lambda: writer(tmp_path / "pipe", writers), "it initializes")
            assert rows(client, "stuck") == [("1", "LOADING", "")]
            shutil.rmtree(folder)
            assert rows(client, "stuck") == [], "it is no folder of the repository any more"
            os.close(writers.pop())
            thread.join(300)
            assert outcome == [200], "what was read before serves"
            assert "failed to poll" in refused(load(server, "stuck"), 500)
            client.unload_model("stuck")
        still_serves(server)
        for _ in range(20):  # deleted at every moment of a load
            write_model(repository, "fleeting", identity_config())
            thread = threading.Thread(target=lambda: outcome.append(load(server, "fleeting").status))
            thread.start()
            shutil.rmtree(repository / "fleeting")
            thread.join(300)
            assert outcome[-1] in STATUSES
        still_serves(server)


def test_a_configuration_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a file is read first; then the writer goes on."""
    folder = write_model(tmp_path, "m", identity_config()[:40])
    read = model_builder.model_config.read
    reads = []

    def reading(*arguments: Any) -> Any:
        reads.append(1)
        try:
            return read(*arguments)
        finally:
            if len(reads) == 1:
                (folder / "config.pbtxt").write_text(identity_config(max_batch_size=4))

    monkeypatch.setattr(model_builder.model_config, "read", reading)
    loader = ModelBuilder.__new__(ModelBuilder)
    loader._settings = Settings(model_repository=(tmp_path,))
    loader._repositories = Repositories(loader._settings)
    found = loader._find("m", LoadParameters(), None)
    assert len(reads) == 2 and found.source.config.max_batch_size == 4


@pytest.mark.slow
def test_a_configuration_that_is_written_without_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", identity_config())
    texts = [identity_config(max_batch_size=size) for size in (4, 8)]
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            (folder / "config.pbtxt").write_text(texts[number % 2])

    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            with httpclient.InferenceServerClient(server.http) as client:
                for _ in range(50):
                    assert load(server, "m").status in (200, 500)
                    assert client.get_model_config("m")["max_batch_size"] in (4, 8)
                    infer(client)
        finally:
            done.set()
            writer.join()
        (folder / "config.pbtxt").write_text(identity_config(max_batch_size=2))
        assert load(server, "m").status == 200
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.get_model_config("m")["max_batch_size"] == 2


# ------------------------------------------------------------------------------ models

LIMITED = ' parameters {{ key: "INITIALIZE_TIMEOUT_SECONDS" value {{ string_value: "{}" }} }}'
NEVER = "import threading\nclass TritonPythonModel:\n    def {where}:\n        threading.Event().wait()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolated", "where"),
    [  # auto_complete_config of an isolated model may take as long as a start of the interpreter: test_isolated
        (False, "initialize(self, args)"),
        (True, "initialize(self, args)"),
        (False, "auto_complete_config(config)"),
    ],
)
def test_a_model_that_never_initializes(tmp_path: Path, isolated: bool, where: str) -> None:
    limit = 10 if isolated else 1  # a process has to start within it
    text = PYTHON + LIMITED.format(limit) + (ISOLATED if isolated else "")
    code = NEVER.format(where=where) + "    def execute(self, requests):\n        return []\n"
    write_model(
        tmp_path,
        "never",
        text,
        {"1/model.py": code.replace("    def auto", "    @staticmethod\n    def auto")},
    )
    write_model(tmp_path, "m", identity_config())
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m", FOR_EVER) as server:
        text = refused(load(server, "never"), 400)
        assert f"did not return within {limit} s" in text and where.partition("(")[0] in text
        with httpclient.InferenceServerClient(server.http) as client:
            assert rows(client, "never")[0][:2] == ("1", "UNAVAILABLE")
            assert "did not return" in rows(client, "never")[0][2]
        still_serves(server)
        assert load(server, "never", **{"async": True}).status == 200
        assert server.stop() == 0, "no stuck thread holds the shutdown up"


@pytest.mark.slow
def test_a_stuck_process_ends_with_its_load(tmp_path: Path) -> None:
    code = (
        NEVER.format(where="initialize(self, args)") + "    def execute(self, requests):\n        return []\n"
    )
    code = code.replace(
        "threading.Event",
        f"open({str(tmp_path / 'pids')!r}, 'a').write(str(__import__('os').getpid()) + '\\n'); threading.Event",
    )
    repository = tmp_path / "repository"
    write_model(repository, "never", PYTHON + ISOLATED, {"1/model.py": code})
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        pids: list[int] = []

        def begun(count: int) -> bool:
            path = tmp_path / "pids"
            pids[:] = [int(line) for line in path.read_text().split()] if path.exists() else []
            return len(pids) == count

        assert load(server, "never", **{"async": True}).status == 200
        until(lambda: begun(1), "it initializes")
        assert post(server, "models/never/unload").status == 200
        until(lambda: not os.path.exists(f"/proc/{pids[0]}"), "the process is gone")
        assert load(server, "never", **{"async": True}).status == 200
        until(lambda: begun(2), "it initializes again")
        assert server.stop() == 0
        until(lambda: not os.path.exists(f"/proc/{pids[1]}"), "and again")


CRASH = """
import os, signal
class TritonPythonModel:
    def initialize(self, args):
        if os.path.exists(os.path.join(args["model_repository"], "crash")):
            os.kill(os.getpid(), signal.SIGSEGV)

    def execute(self, requests):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_an_isolated_model_that_segfaults(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "crash", PYTHON + ISOLATED, {"1/model.py": CRASH, "crash": ""})
    write_model(tmp_path, "m", identity_config())
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        assert "killed by signal 11 (SIGSEGV)" in refused(load(server, "crash"), 400), "during load"
        with httpclient.InferenceServerClient(server.http) as client:
            assert "SIGSEGV" in rows(client, "crash")[0][2]
            (folder / "crash").unlink()
            client.load_model("crash")
            with pytest.raises(InferenceServerException, match="killed by signal 11"):
                infer(client, "crash")
            infer(client)
            until(lambda: client.is_model_ready("crash"), "it was started again")
            client.load_model("crash")
            client.unload_model("crash")
        still_serves(server)
        assert server.stop(signal.SIGTERM) == 0
