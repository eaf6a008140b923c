"""A disk of traces that hangs: whoever waits for it waits alone, and the server ends all the same."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.support.repository import identity_config, write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess
from tests.support.waiting import until

SITE = """
import pathlib, threading
from neptrio.observe import trace_file

def hang(*_):
    pathlib.Path({flag!r}).touch()
    threading.Event().wait()

trace_file.TraceWriter._append = hang
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "seconds", "said"), [(True, 1, "exit timeout expired"), (False, 30, "traces are lost")]
)
def test_it_does_not_hold_the_exit(tmp_path: Path, waits: bool, seconds: int, said: str) -> None:
    write_model(tmp_path / "models", "m", identity_config("TYPE_FP32", "1", pairs=1))
    flags = (f"--trace-config=triton,file={tmp_path}/trace.json", "--trace-config=rate=1")
    more = ("--trace-config=level=TIMESTAMPS", f"--exit-timeout-secs={seconds}")
    env = with_site(tmp_path, SITE.format(flag=f"{tmp_path}/hangs"))
    with ServerProcess(tmp_path / "models", *flags, *more, env=env) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            tensor = httpclient.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            client.infer("m", [tensor])
        until((tmp_path / "hangs").exists, "a trace is being written")
        with contextlib.closing(http.client.HTTPConnection(server.http, timeout=60)) as other:
            if waits:
                other.request("POST", "/v2/trace/setting", json.dumps({"trace_rate": "2"}))
                with httpclient.InferenceServerClient(server.http) as client:
                    until(
                        lambda: client.get_trace_settings()["trace_rate"] == "2", "it is waited for the disk"
                    )
            server.stop()  # which fails if it does not end
        server.until_logged(said)


def trace_setting(server: ServerProcess, name: str, value: str) -> http.client.HTTPConnection:
    """An update that waits for its answer."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/trace/setting", json.dumps({name: value}))
    return connection


def answered(server: ServerProcess, method: str, path: str) -> bool:
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=60)) as connection:
        connection.request(method, path)
        return connection.getresponse().status == 200


@pytest.mark.slow
def test_updates_that_wait_for_it_take_no_threads_of_others(tmp_path: Path) -> None:
    count = 50  # trio's own limit is 40
    write_model(tmp_path / "models", "m", identity_config("TYPE_FP32", "1", pairs=1))
    flags = (f"--trace-config=triton,file={tmp_path}/trace.json", "--trace-config=level=TIMESTAMPS")
    env = with_site(tmp_path, SITE.format(flag=f"{tmp_path}/hangs"))
    with (
        ServerProcess(
            tmp_path / "models", *flags, "--trace-config=rate=1", "--exit-timeout-secs=1", env=env
        ) as server,
        contextlib.ExitStack() as waiting,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        tensor = httpclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        client.infer("m", [tensor])
        until((tmp_path / "hangs").exists, "a trace is being written")
        for rate in map(str, range(2, 2 + count)):
            waiting.enter_context(contextlib.closing(trace_setting(server, "trace_rate", rate)))
            until(
                lambda rate=rate: client.get_trace_settings()["trace_rate"] == rate, "it waits for the disk"
            )  # type: ignore[misc]
        assert answered(server, "POST", "/v2/repository/index")
        server.stop()


LOOK = """
import pathlib, threading
from neptrio.service import trace

def hang(file, folder, allowed):
    pathlib.Path({flag!r}).touch()
    threading.Event().wait()

trace.check_file = hang
"""


@pytest.mark.slow
def test_nobody_waits_for_a_look_at_it_but_who_has_asked(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", identity_config("TYPE_FP32", "1", pairs=1))
    env = with_site(tmp_path, LOOK.format(flag=f"{tmp_path}/hangs"))
    flags = (f"--trace-dir={tmp_path}", "--exit-timeout-secs=1")
    with (
        ServerProcess(tmp_path / "models", *flags, env=env) as server,
        contextlib.closing(trace_setting(server, "trace_file", "t")),
    ):
        until((tmp_path / "hangs").exists, "it looks")
        assert answered(server, "GET", "/v2/health/ready")
        server.stop()
