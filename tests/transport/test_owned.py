"""Sequences and cached answers belong to the token that made them: over REST, ModelInfer and ModelStreamInfer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Caller, Stream, sequence_config
from tests.support.http import Http1, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.test_tokens import ask, auth, row

MISSING = "must specify the START flag"
IDLE_US = 3_600_000_000

# keeps what it is told under the correlation id, as models do that are batched with the strategy `oldest`
LEDGER = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            key = request.correlation_id()
            value = int(pb.get_input_tensor_by_name(request, "INPUT").as_numpy().flat[0])
            self.sums[key] = value if request.flags() & 1 else self.sums[key] + value
            answers.append(pb.InferenceResponse([
                pb.Tensor("OUTPUT", np.array([[self.sums[key]]], np.int32)),
                pb.Tensor("CORRID", np.array([[str(key)]], object)),
            ]))
        return answers
"""
LEDGER_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "CORRID" data_type: TYPE_STRING dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 3600000000 oldest { max_candidate_sequences: 4 } }
"""
IN_SERVER = 'parameters { key: "isolation" value { string_value: "none" } }'
# INPUT -> INPUT * 2 by a call of the cached model
CALLER = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            inner = pb.InferenceRequest(
                model_name="cached",
                requested_output_names=["OUTPUT0"],
                inputs=[pb.get_input_tensor_by_name(request, "INPUT0")],
            )
            answers.append(pb.InferenceResponse(inner.exec().output_tensors()))
        return answers
"""
CALLER_CONFIG = """
backend: "python" max_batch_size: 1
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [ { model_name: "cached" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } ] }
"""
FILE = (
    row("alice", "infer", "read")
    + row("bob", "infer", "read")
    + row("boss", "operate", "read")
    + row("watcher", "read")
    + '[anonymous]\nscopes = ["infer"]\n'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("owned")
    models = folder / "models"
    write_model(models, "direct", sequence_config("direct { }", 4, idle_us=IDLE_US))
    write_model(
        models, "oldest", sequence_config("oldest { max_candidate_sequences: 8 }", 4, idle_us=IDLE_US)
    )
    write_model(models, "short", sequence_config("direct { }", 4, idle_us=IDLE_US, corrid="TYPE_INT32"))
    write_model(models, "named", sequence_config("direct { }", 4, idle_us=IDLE_US, corrid="TYPE_STRING"))
    write_model(models, "ledger", LEDGER_CONFIG, {"1/model.py": LEDGER})
    write_model(models, "ledger_in_server", LEDGER_CONFIG + IN_SERVER, {"1/model.py": LEDGER})
    write_model(models, "cached", identity_config(pairs=1, extra="response_cache { enable: true }"))
    write_model(models, "ensemble", ENSEMBLE)
    write_model(models, "caller", CALLER_CONFIG, {"1/model.py": CALLER})
    write_model(models, "caller_in_server", CALLER_CONFIG + IN_SERVER, {"1/model.py": CALLER})
    (folder / "auth.toml").write_text(FILE)
    with ServerProcess(
        models, f"--auth-config={folder}/auth.toml", "--cache-config=local,size=1000000"
    ) as process:
        yield process


Say = Callable[..., dict[str, Any]]


@pytest.fixture(params=["http", "grpc", "stream"])
def say(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Say]:
    """say(token, model, sequence, flags, value) -> outputs, over one protocol; "" is no token."""
    with ExitStack() as stack:
        callers: dict[str, Any] = {}

        def call(token: str, model: str, sequence: Any, text: str, value: int) -> dict[str, Any]:
            headers = {"authorization": f"Bearer {token}"} if token else None
            if request.param != "stream":
                caller = callers.get("")
                if caller is None:
                    caller = callers[""] = stack.enter_context(Caller(server, request.param))
                return dict(caller(model, sequence, text, value, headers=headers))
            if token not in callers:
                callers[token] = stack.enter_context(Stream(server, headers))
            callers[token].send(model, sequence, text, value)
            return dict(callers[token].receive())

        yield call


def control(server: ServerProcess, token: str, method: str, path: str) -> Reply:
    with Http1(server.http) as client:
        return ask(client, token, method, path)


def listed(server: ServerProcess, token: str, model: str) -> list[tuple[Any, Any]]:
    reply = control(server, token, "GET", f"/v2/models/{model}/sequences")
    assert reply.status == 200
    return [(found["id"], found["token"]) for found in json.loads(reply.body)["sequences"]]


@pytest.mark.parametrize("model", ["direct", "oldest", "short", "ledger", "ledger_in_server"])
def test_one_id_under_two_tokens_is_two_sequences(say: Say, model: str) -> None:
    first = say("alice", model, 7, "s", 1)
    assert (first["OUTPUT"], int(first["CORRID"])) == (1, 7)
    with pytest.raises(InferenceServerException, match=MISSING):
        say("bob", model, 7, "", 100)  # as for an id that nobody has
    second = say("bob", model, 7, "s", 10)
    assert second["OUTPUT"] == 10
    assert int(second["CORRID"]) != 7  # a model that keeps state under the id keeps two
    third = say("", model, 7, "s", 50)
    assert len({int(found["CORRID"]) for found in (first, second, third)}) == 3
    assert say("alice", model, 7, "", 2)["OUTPUT"] == 3
    assert say("bob", model, 7, "", 20)["OUTPUT"] == 30
    assert say("bob", model, 7, "e", 0)["CORRID"] == second["CORRID"]
    assert say("alice", model, 7, "e", 3)["OUTPUT"] == 6
    assert say("", model, 7, "e", 1)["OUTPUT"] == 51
    # the id is free again
    again = say("bob", model, 7, "se", 4)
    assert (again["OUTPUT"], int(again["CORRID"])) == (4, 7)


def test_ids_that_look_alike_to_the_model(say: Say) -> None:
    """CORRID of type INT32 has the low bytes of an id only."""
    assert say("alice", "short", 5, "s", 1)["CORRID"] == 5
    assert say("bob", "short", (1 << 32) + 5, "se", 10)["CORRID"] != 5
    assert say("alice", "short", 5, "e", 1)["OUTPUT"] == 2


def test_ids_of_text(say: Say) -> None:
    assert say("alice", "named", "seven", "s", 1)["CORRID"] == b"seven"
    with pytest.raises(InferenceServerException, match=MISSING):
        say("bob", "named", "seven", "", 1)
    other = say("bob", "named", "seven", "s", 10)
    assert other["CORRID"] != b"seven"
    assert say("bob", "named", "seven", "e", 10)["OUTPUT"] == 20
    assert say("alice", "named", "seven", "e", 1)["OUTPUT"] == 2


def test_only_those_who_may_operate_see_and_end_sequences_of_others(say: Say, server: ServerProcess) -> None:
    for token, sequence in (("alice", 1), ("bob", 1), ("bob", 2)):
        say(token, "direct", sequence, "s", 1)
    assert listed(server, "alice", "direct") == [(1, "alice")]
    assert listed(server, "watcher", "direct") == []
    assert sorted(listed(server, "boss", "direct")) == [(1, "alice"), (1, "bob"), (2, "bob")]
    reply = control(server, "watcher", "GET", "/v2/models/direct/sequences")
    assert json.loads(reply.body)["live"] == 3
    end = "/v2/models/direct/sequences/{}/end{}"
    for token in ("alice", "bob"):
        reply = control(server, token, "POST", end.format(1, "?token=alice"))
        assert (reply.status, "needs the scope operate" in reply.body.decode()) == (403, True)
    reply = control(server, "boss", "POST", end.format(1, ""))
    assert reply.status == 400
    assert "2 tokens have a live sequence with the id 1" in reply.body.decode()
    assert control(server, "boss", "POST", end.format(1, "?token=nobody")).status == 404
    assert control(server, "boss", "POST", end.format(1, "?token=alice")).status == 200
    assert control(server, "boss", "POST", end.format(2, "")).status == 200
    with pytest.raises(InferenceServerException, match=MISSING):
        say("alice", "direct", 1, "", 1)
    assert say("bob", "direct", 1, "e", 1)["OUTPUT"] == 2


def test_the_command_shows_whose_sequences_are(server: ServerProcess) -> None:
    from neptrio.commands.sequences import table

    with Caller(server, "grpc") as caller:
        caller("oldest", 3, "s", 1, headers=auth("bob"))
        reply = control(server, "boss", "GET", "/v2/models/oldest/sequences")
        text = table(json.loads(reply.body))
        assert "token" in text.splitlines()[0]
        assert "bob" in text.splitlines()[1]
        caller("oldest", 3, "e", 1, headers=auth("bob"))


# ---------------------------------------------------------------- cached answers


CACHED = ["cached", "ensemble", "caller", "caller_in_server"]


def executions(server: ServerProcess) -> int:
    with httpclient.InferenceServerClient(server.http) as client:
        found = client.get_inference_statistics("cached", headers=auth("watcher"))
    return int(found["model_stats"][0]["execution_count"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", CACHED)
def test_nobody_gets_an_answer_that_another_has_cached(
    server: ServerProcess, protocol: str, model: str
) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    address = server.http if protocol == "http" else server.grpc
    number = 10 * CACHED.index(model) + (protocol == "http")  # every test has inputs of its own
    tensor = module.InferInput("INPUT0", [1, 16], "INT32")
    tensor.set_data_from_numpy(np.full((1, 16), number, np.int32))
    with module.InferenceServerClient(address) as client:
        for token, runs in (("alice", 1), ("alice", 0), ("bob", 1), ("alice", 0), ("bob", 0)):
            before = executions(server)
            result = client.infer(model, [tensor], headers=auth(token))
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 16), number))
            assert executions(server) - before == runs, token
