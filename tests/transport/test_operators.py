"""Control verbs of who may use them are answered under every limit on clients, at the public ports as well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import FRONTENDS, ServerProcess, without_front_ends
from tests.support.waiting import until
from tests.transport.test_overload import GATED, client
from tests.transport.test_tokens import BODY, INFER, KINDS, ask, auth, row

FILE = row("boss", "operate", "admin", "read") + row("app", "infer", "read")
LOAD = "/v2/repository/models/simple/load"
STATUSES: tuple[int, ...] = (429, 503)
REFUSALS: tuple[str, ...] = ("StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED")
if FRONTENDS:  # a front end looks at rights before the engine looks at limits (docs/frontends.md)
    STATUSES += (401, 403)
    REFUSALS += ("StatusCode.UNAUTHENTICATED", "StatusCode.PERMISSION_DENIED")
Begin = Callable[[ServerProcess, ExitStack], None]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Gate]]:
    folder = tmp_path_factory.mktemp("gated")
    write_model(folder / "models", "simple", identity_config())
    made = Gate(folder / "models", folder)
    (folder / "auth.toml").write_text(FILE)
    yield folder, made
    made.close()


def connected(server: ServerProcess, stack: ExitStack) -> None:
    """Two connections whose requests are on their way: idle ones would make room after seconds."""
    for _ in range(2):
        held = stack.enter_context(Http1(server.http))
        held.send(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer app\r\nExpect: 100-continue\r\n"
            b"Content-Length: 1000\r\n\r\n" % INFER.encode()
        )
        assert held.head().status == 100


def spent(server: ServerProcess, stack: ExitStack) -> None:
    with Http1(server.http) as made:
        until(lambda: ask(made, "app", "POST", INFER, BODY).status == 429, "the second's requests are spent")


def under_way(server: ServerProcess, stack: ExitStack) -> None:
    held = stack.enter_context(Http1(server.http))
    held.send(
        b"POST /v2/models/gate/infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer app\r\n"
        b"Content-Length: %d\r\n\r\n" % len(GATED) + GATED
    )


# flags that set a limit -> what uses it up
LIMITS: dict[str, Begin] = {
    "--max-connections=2": connected,
    "--max-connections-per-address=2": connected,
    "--max-requests-per-second-per-address=1": spent,
    "--max-concurrent-requests-per-address=1": under_way,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", LIMITS)
def test_operators_get_in_with_a_token(gate: tuple[Path, Gate], kind: str, flag: str) -> None:
    folder, door = gate
    flags = [f"--auth-config={folder}/auth.toml", "--model-control-mode=explicit", "--load-model=*", flag]
    flags.append("--http-request-timeout-secs=600")
    if kind == "hypercorn":
        flags.append("--http-lean=false")

    def refused(token: str, method: str, path: str, body: bytes = b"") -> bool:
        with client(server, kind) as made:
            return ask(made, token, method, path, body).status in STATUSES

    def load(token: str) -> None:
        with triton_grpc.InferenceServerClient(server.grpc) as triton:
            triton.load_model("simple", headers=auth(token))

    def log(token: str) -> None:
        with triton_grpc.InferenceServerClient(server.grpc) as triton:
            triton.update_log_settings({"log_verbose_level": 0}, headers=auth(token))

    with ServerProcess(folder / "models", *flags) as server, ExitStack() as stack:
        LIMITS[flag](server, stack)
        if LIMITS[flag] is under_way:
            door.started()
        try:
            for method, path, body in (
                ("POST", LOAD, b""),
                ("POST", "/v2/logging", b"{}"),
                ("POST", "/v2/trace/setting", b"{}"),
                ("GET", "/v2/trace/recent", b""),
            ):
                assert not refused("boss", method, path, body)
            calls: list[Any] = [load, log]
            for call in calls:
                call("boss")
            # not for others, and not for what only reads
            if LIMITS[flag] is not spent:
                for token, method, path in (
                    ("app", "POST", LOAD),
                    ("nobody", "POST", LOAD),
                    ("boss", "GET", "/v2/models/simple"),
                    ("boss", "GET", "/v2/logging"),
                ):
                    assert refused(token, method, path)
                for call in calls:
                    for token in ("app", "nobody"):
                        with pytest.raises(InferenceServerException) as error:
                            call(token)
                        assert error.value.status() in REFUSALS
        finally:
            if LIMITS[flag] is under_way:
                door.go()


@pytest.mark.slow
@without_front_ends  # each has its part of the bytes, and connections are not dealt out evenly
def test_operators_get_in_while_bytes_are_held(gate: tuple[Path, Gate]) -> None:
    """gRPC refuses new calls while requests and answers hold more than they may."""
    folder, _ = gate
    flags = [f"--auth-config={folder}/auth.toml", "--model-control-mode=explicit", "--load-model=*"]
    with ServerProcess(folder / "models", *flags, "--max-held-bytes=1000000") as server, ExitStack() as stack:
        for _ in range(40):  # below what is asked for each, and too much together
            held = stack.enter_context(Http1(server.http))
            held.send(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer app\r\nContent-Length: 32768\r\n\r\n"
                % INFER.encode()
                + b" " * 32767
            )
        triton = stack.enter_context(triton_grpc.InferenceServerClient(server.grpc))

        def full() -> bool:
            try:
                triton.get_model_metadata("simple", headers=auth("app"))
            except InferenceServerException as error:
                return "--max-held-bytes" in str(error)
            return False

        until(full, "the bytes are counted")
        triton.load_model("simple", headers=auth("boss"))
        with pytest.raises(InferenceServerException, match="max-held-bytes"):
            triton.load_model("simple", headers=auth("app"))
        with Http1(server.http) as made:
            assert json.loads(ask(made, "boss", "POST", "/v2/logging", b"{}").body)
