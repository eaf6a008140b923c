"""Requests leave nothing that only the collector could free, however they end."""

from __future__ import annotations

import gc
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.embedded import EmbeddedServer
from tests.support.garbage import left_in_cycles
from tests.support.http import Http1
from tests.support.openai_models import role
from tests.support.repository import identity_config, write_model
from tests.support.streams import Answers
from tests.support.traced import FAILING, ONE, REPEAT, REPEAT_CONFIG

HERE = ' parameters { key: "isolation" value { string_value: "none" } } '
HALF = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        output = pb_utils.Tensor("OUT", np.zeros(1, np.float16))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
TEXTS = 'input [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ] output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]'
FOLLOWED = """
platform: "ensemble" input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "repeat" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "between" } },
  { model_name: "one" model_version: -1 input_map { key: "INPUT0" value: "between" } output_map { key: "OUTPUT0" value: "OUT" } }
] }
"""
INFER = "/v2/models/wide/infer"
# more than the loop decodes
LARGE = b'{"inputs":[{"name":"INPUT0","shape":[200000],"datatype":"FP32","data":[%s1]}]}' % (b"1," * 199_999)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder: Path = tmp_path_factory.mktemp("freed")
    models = folder / "models"
    write_model(models, "wide", identity_config("TYPE_FP32", "-1", 0, 1))
    write_model(models, "one", identity_config("TYPE_INT32", "1", 0, 1))
    write_model(models, "repeat", REPEAT_CONFIG + HERE, {"1/model.py": REPEAT})
    write_model(models, "followed", FOLLOWED)
    write_model(models, "failing", ONE + HERE, {"1/model.py": FAILING})
    half = TEXTS.replace("TYPE_STRING", "TYPE_FP16").replace("TYPE_FP16", "TYPE_STRING", 1)
    write_model(models, "half", f'backend: "python" {half} {HERE}', {"1/model.py": HALF})
    talks = f'backend: "identity" {TEXTS} {role("prompt", "IN")} {role("text", "OUT")} {role("chat_template", "chat.jinja")}'
    write_model(models, "talks", talks, {"chat.jinja": "{{ raise_exception('not this') }}"})
    with EmbeddedServer(
        models,
        allow_client_shm=True,
        grpc_infer_response_compression_level="low",
        trace_dir=folder / "traces",
    ) as made:
        made.run(made.server.settled)
        made.until(made.grpc_server.handlers_loaded.is_set, "no thread imports anything any more")
        yield made


def left_by(server: EmbeddedServer, work: Callable[[EmbeddedServer], None]) -> Counter[str]:
    """What of the server's objects is left in cycles by work that was done once before, by type."""

    def idle() -> bool:
        return not server.server.services.workers.statistics().busy

    work(server)  # what is made once is made
    server.until_idle()
    gc.collect()
    gc.disable()
    try:
        work(server)
        server.until_idle()
        server.until(idle, "no worker works")
        return server.ask(left_in_cycles)
    finally:
        gc.enable()


def refused_by_a_worker(server: EmbeddedServer) -> None:
    with Http1(server.http) as client:
        for body in (LARGE[:-2], LARGE.replace(b"FP32", b"FP99"), LARGE.replace(b"200000", b"200001")):
            assert client.request("POST", INFER, body).status == 400
        damaged = gzip.compress(LARGE)[:-20]
        assert client.request("POST", INFER, damaged, {"Content-Encoding": "gzip"}).status == 400


def refused_by_the_loop_for_a_worker(server: EmbeddedServer) -> None:
    parameters = {"shared_memory_region": "nowhere", "shared_memory_byte_size": 800_000}
    outputs = json.dumps([{"name": "OUTPUT0", "parameters": parameters}]).encode()
    with Http1(server.http) as client:
        reply = client.request("POST", INFER, b'{"outputs":%s,%s' % (outputs, LARGE[1:]))
        assert reply.status == 404 and b"Unable to find" in reply.body


def compressed(server: EmbeddedServer) -> None:
    """Which the fast path leaves to others."""
    with grpcclient.InferenceServerClient(server.grpc) as client:
        wide = grpcclient.InferInput("INPUT0", [1000], "FP32").set_data_from_numpy(np.ones(1000, np.float32))
        client.infer("wide", [wide], compression_algorithm="gzip")
        with pytest.raises(InferenceServerException, match="unknown"):
            client.infer("unknown", [wide], compression_algorithm="gzip")
        many = grpcclient.InferInput("IN", [1, 16], "INT32").set_data_from_numpy(np.ones((1, 16), np.int32))
        with pytest.raises(InferenceServerException, match="no luck"):
            client.infer("failing", [many])


def responses_of_an_ensemble(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        three = grpcclient.InferInput("IN", [1], "INT32").set_data_from_numpy(np.array([3], np.int32))
        client.async_stream_infer("followed", [three])
        answers.results(3)


def traced(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        levels = ["TIMESTAMPS", "TENSORS"]
        client.update_trace_settings(None, {"trace_level": levels, "trace_rate": "1", "trace_file": "t"})
        responses_of_an_ensemble(server)
        client.update_trace_settings(None, {"trace_level": ["OFF"]})


def an_answer_that_json_cannot_have(server: EmbeddedServer) -> None:
    with Http1(server.http) as client:
        assert client.request("POST", "/v2/models/half/generate", b'{"IN":"x"}').status == 400


def a_template_that_refuses(server: EmbeddedServer) -> None:
    messages = [{"role": "user", "content": "x"}]
    with Http1(server.http) as client:
        body = json.dumps({"model": "talks", "messages": messages}).encode()
        reply = client.request("POST", "/v1/chat/completions", body)
        assert reply.status == 400 and b"not this" in reply.body


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        refused_by_a_worker,
        refused_by_the_loop_for_a_worker,
        compressed,
        responses_of_an_ensemble,
        traced,
        an_answer_that_json_cannot_have,
        a_template_that_refuses,
    ],
)
def test_nothing_is_left_in_cycles(server: EmbeddedServer, work: Callable[[EmbeddedServer], None]) -> None:
    assert not left_by(server, work)


@pytest.mark.slow
def test_what_the_engine_refuses_to_a_front_end_is_freed(tmp_path: Path) -> None:
    def ask(client: grpcclient.InferenceServerClient) -> None:
        with pytest.raises(InferenceServerException, match="unknown"):
            client.get_model_config("unknown")

    write_model(tmp_path, "one", identity_config("TYPE_INT32", "1", 0, 1))
    with EmbeddedServer(tmp_path, frontends=1) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            ask(client)  # what is made once is made
            gc.collect()
            gc.disable()
            try:
                ask(client)
                client.is_server_ready()  # the call before has ended
                assert not server.ask(left_in_cycles)
            finally:
                gc.enable()
