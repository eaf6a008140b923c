"""Limits of a token: requests per second and at once, over every protocol, with clear answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Stream
from tests.support.gate import Gate
from tests.support.http import Http1, Http2
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until
from tests.transport.test_overload import GATED, client, told_to_wait
from tests.transport.test_tokens import BODY, INFER, KINDS, ask, auth, row

SCOPES = ("infer", "read", "operate", "admin")
FILE = (
    row("slow", *SCOPES)
    + "requests_per_second = 1\n"
    + row("narrow", *SCOPES)
    + "concurrent_requests = 1\n"
    + row("free", *SCOPES)
)
GATE = "/v2/models/gate/infer"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Gate]]:
    folder = tmp_path_factory.mktemp("gated")
    repository = folder / "models"
    write_model(repository, "simple", identity_config())
    made = Gate(repository, folder)
    (folder / "auth.toml").write_text(FILE)
    yield repository, made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(gate: tuple[Path, Gate], kind: str) -> Iterator[ServerProcess]:
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    if kind == "hypercorn":
        flags.append("--http-lean=false")
    with ServerProcess(gate[0], f"--auth-config={gate[0].parent}/auth.toml", *flags) as process:
        yield process


def test_requests_per_second(server: ServerProcess, kind: str) -> None:
    with client(server, kind) as one, client(server, kind) as two:
        # whenever a second begins, of many in a row most are too many
        for method, path, body in (("POST", INFER, BODY), ("GET", "/v2/models/simple", b"")):
            replies = [ask((one, two)[i % 2], "slow", method, path, body) for i in range(50)]
            assert {reply.status for reply in replies} <= {200, 429}
            assert (
                replies[0].status == 200 or method == "GET"
            )  # what was spent on the one is spent for the other
            refused = next(reply for reply in replies if reply.status == 429)
            told_to_wait(refused, 429, "token 'slow' may make 1 requests per second")
        # what keeps a server going is not counted
        for _ in range(5):
            assert one.request("GET", "/v2/health/ready").status == 200
            assert ask(one, "slow", "POST", "/v2/logging", b"{}").status == 200
            assert ask(one, "slow", "POST", "/v2/repository/models/simple/load").status == 200
            assert ask(one, "free", "POST", INFER, BODY).status == 200
    with triton_grpc.InferenceServerClient(server.grpc) as triton:
        for call in (
            lambda: triton.infer("simple", identity_inputs(triton_grpc), headers=auth("slow")),
            lambda: triton.get_model_metadata("simple", headers=auth("slow")),
        ):
            with pytest.raises(InferenceServerException, match="1 requests per second") as error:
                for _ in range(50):
                    call()
            assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        triton.update_log_settings({"log_verbose_level": 0}, headers=auth("slow"))
        with Answers(triton, headers=auth("slow")) as answers:
            for _ in range(50):
                triton.async_stream_infer("simple", identity_inputs(triton_grpc))
            assert any("1 requests per second" in str(answers.next()) for _ in range(50))


def send(client: Http1 | Http2, token: str) -> int:
    """Sends a request of the gated model without waiting for its answer."""
    return client.start("POST", GATE, GATED, {"authorization": f"Bearer {token}"})


def test_concurrent_requests(server: ServerProcess, gate: tuple[Path, Gate], kind: str) -> None:
    door = gate[1]
    text = "token 'narrow' has 1 requests under way"
    with client(server, kind) as held, client(server, kind) as other:
        with triton_grpc.InferenceServerClient(server.grpc) as triton:
            stream = send(held, "narrow")
            door.started()
            told_to_wait(ask(other, "narrow", "POST", INFER, BODY), 429, text)
            with pytest.raises(InferenceServerException, match=text) as error:
                triton.infer("simple", identity_inputs(triton_grpc), headers=auth("narrow"))
            assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            # it is a limit on inference, and on this token
            assert ask(other, "narrow", "GET", "/v2/models/simple").status == 200
            assert ask(other, "narrow", "POST", "/v2/repository/models/simple/load").status == 200
            assert ask(other, "free", "POST", INFER, BODY).status == 200
            door.go()
            assert held.finish(stream).status == 200
            assert ask(other, "narrow", "POST", INFER, BODY).status == 200
        # messages of streams
        with Stream(server, auth("narrow")) as first, Stream(server, auth("narrow")) as second:
            first.send("gate", 0, "", 1, name="INPUT0")
            door.started()
            second.send("gate", 0, "", 1, name="INPUT0")
            with pytest.raises(InferenceServerException, match=text):
                second.receive()
            told_to_wait(ask(other, "narrow", "POST", INFER, BODY), 429, text)
            door.go()
            assert first.receive()["OUTPUT0"] == 1
            second.send("gate", 0, "", 2, name="INPUT0")
            door.started()
            door.go()
            assert second.receive()["OUTPUT0"] == 2


def test_a_client_that_leaves_gives_back_what_it_had(
    server: ServerProcess, gate: tuple[Path, Gate], kind: str
) -> None:
    door = gate[1]
    with client(server, kind) as other:
        with client(server, kind) as gone:
            send(gone, "narrow")
            door.started()
            assert ask(other, "narrow", "POST", INFER, BODY).status == 429
        door.go()
        until(lambda: ask(other, "narrow", "POST", INFER, BODY).status == 200, "the place is free")
        # a request that is refused holds none
        assert ask(other, "narrow", "POST", INFER, b"{}").status == 400
        assert ask(other, "narrow", "POST", INFER, BODY).status == 200


def test_a_request_whose_trace_is_refused_is_not_under_way(gate: tuple[Path, Gate]) -> None:
    flags = (f"--auth-config={gate[0].parent}/auth.toml", "--allow-forced-trace=true")
    odd = BODY.replace(b"{", b'{"parameters":{"neptrio_trace":"EVERYTHING"},', 1)
    with ServerProcess(gate[0], *flags) as server, client(server, "lean") as one:
        for _ in range(2):
            reply = ask(one, "narrow", "POST", INFER, odd)
            assert (reply.status, b"expected true, false" in reply.body) == (400, True)
        assert ask(one, "narrow", "POST", INFER, BODY).status == 200
