"""Whatever a client makes long, a text of a mebibyte or a list of a million elements, in any field of any verb: the server
stays small, its loop goes on, and the answer is short.

The cases are made from the protocol's descriptors and from one document for each REST verb with a body, so that a new
verb or field is tried as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from neptrio.codec.descriptors import file_set, is_list, pool
from neptrio.limits import LONGEST_ERROR, MOST_VALUES
from neptrio.transport.rest import routes
from tests.support.http import Http1
from tests.support.metrics import families, scrape
from tests.support.repository import write_model
from tests.support.server import ServerProcess

CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""
TEXT = "x" * (1 << 20)
MANY = 1_000_000
LISTS = {element: "[" + ",".join([element] * MANY) + "]" for element in ("0", "[]")}
MOST_MEMORY = 192 << 20  # of all cases together; a request is a few MiB, of which there are copies
MOST_LAG = 4.5  # seconds, on a busy machine, too; one of the bounds of the metric is just below
MOST_ANSWER = 8 << 10
INFER = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}
SHM = {"key": "/k", "offset": 0, "byte_size": 64, "raw_handle": {"b64": "AAAA"}, "device_id": 0}
# a document for each verb with a body
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "infer": (
        "/v2/models/m/infer",
        {
            **INFER,
            "id": "1",
            "parameters": {"p": "v"},
            "outputs": [{"name": "OUTPUT0", "parameters": {"q": 1}}],
        },
    ),
    "infer_stream": ("/v2/models/m/infer_stream", {**INFER, "id": "1", "parameters": {"p": "v"}}),
    "generate": ("/v2/models/m/generate", {"INPUT0": [1], "p": "v", "parameters": {"q": "w"}}),
    "generate_stream": ("/v2/models/m/generate_stream", {"INPUT0": [1], "p": "v", "parameters": {"q": "w"}}),
    "sequence_end": ("/v2/models/m/sequences/1/end", {"p": "v"}),
    "trace_setting": ("/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1"}),
    "logging": ("/v2/logging", {"log_format": "default", "log_verbose_level": 0}),
    "system_shm_register": ("/v2/systemsharedmemory/region/r/register", SHM),
    "system_shm_unregister": ("/v2/systemsharedmemory/region/r/unregister", {"p": "v"}),
    "cuda_shm_register": ("/v2/cudasharedmemory/region/r/register", SHM),
    "cuda_shm_unregister": ("/v2/cudasharedmemory/region/r/unregister", {"p": "v"}),
    "repository_index": ("/v2/repository/index", {"ready": True}),
    "repository_load": ("/v2/repository/models/m/load", {"parameters": {"config": "{}", "file:1/f": "AAAA"}}),
    "repository_unload": ("/v2/repository/models/none/unload", {"parameters": {"unload_dependents": False}}),
    "label_setting": ("/v2/models/m/labels", {"labels": {"stable": 1}, "aliases": {"p": True}}),
    "repository_check": ("/v2/repository/models/m/check", {"parameters": {"config": "{}"}}),
    "openai_completions": ("/v1/completions", {"model": "m", "prompt": ["p"], "stop": ["s"]}),
    "openai_chat": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "c"}]}),
    "openai_embeddings": ("/v1/embeddings", {"model": "m", "input": ["i"]}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("sizes")
    write_model(repository, "m", CONFIG)
    flags = "--model-control-mode=explicit", "--load-model=m", "--allow-client-shm=true", "--log-verbose=1"
    with ServerProcess(repository, *flags) as made:
        yield made


def variants(document: Any) -> Iterator[tuple[str, bytes]]:
    """The document with one of its texts or names made long, or one of its values a long list."""
    text = json.dumps(document)
    values = [json.dumps(value) for value in dict.fromkeys(re.findall(r'"([^"]*)"', text))]
    for value in values:
        yield f"text {value}", text.replace(value, f'"{TEXT}"', 1).encode()
    for found in re.finditer(r'(?<=: )(\[[^\[\]{}]*\]|"[^"]*"|\d+|true|false)', text):
        for element, many in LISTS.items():
            if element == "[]" or found[0][0] == "[":
                yield (
                    f"{element} at {found[0]}",
                    (text[: found.start()] + many + text[found.end() :]).encode(),
                )


def field(number: int, content: bytes) -> bytes:
    """A field with a length, in protobuf's wire format."""
    tag, size = number << 3 | 2, len(content)
    made = bytearray()
    for value in (tag, size):
        while value > 127:
            made.append(value & 127 | 128)
            value >>= 7
        made.append(value)
    return bytes(made) + content


def messages(descriptor: Any, wrap: Callable[[bytes], bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Messages of a type in which one text is long, or one list or map."""
    for each in descriptor.fields:
        path = f"{name}.{each.name}"
        if is_list(each):
            packed = (
                each.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
                and each.message_type is None
            )
            yield (
                f"{path}[]",
                wrap(field(each.number, b"\1" * MANY) if packed else field(each.number, b"") * MANY),
            )
        if each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield path, wrap(field(each.number, TEXT.encode()))
        if each.message_type is not None:
            yield from messages(each.message_type, lambda c, n=each.number: wrap(field(n, c)), path)  # type: ignore[misc]


def memory(server: ServerProcess) -> int:
    """The most that the server had resident so far."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def check(server: ServerProcess, before: int) -> None:
    """Memory stayed small, and the loop never stood for long."""
    grown = memory(server) - before
    assert grown < MOST_MEMORY, f"{grown >> 20} MiB"
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in families(scrape(server))["neptrio_loop_lag_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert buckets[math.inf] == max(passes for most, passes in buckets.items() if most <= MOST_LAG), buckets


def test_every_verb_with_a_body_is_tried() -> None:
    assert set(DOCUMENTS) == {verb for verb, _, methods in routes.TABLE if "POST" in methods}


@pytest.mark.slow
def test_long_fields_over_rest(server: ServerProcess) -> None:
    before = memory(server)
    for verb, (path, document) in DOCUMENTS.items():
        for what, body in variants(document):
            with Http1(server.http) as http:
                reply = http.request("POST", path, body)
            said = f"{verb} with {what}: {reply.status}"
            assert len(reply.body) < MOST_ANSWER or reply.status == 200, said
            assert reply.status < 500 or reply.status == 503 or b"internal error" not in reply.body, said
    check(server, before)


@pytest.mark.slow
def test_long_fields_over_grpc(server: ServerProcess) -> None:
    before = memory(server)
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options) as channel:
        for file in file_set().file:
            for service in file.service:
                for method in pool().FindServiceByName(f"{file.package}.{service.name}").methods:
                    path = f"/{file.package}.{service.name}/{method.name}"
                    begin = field(1, b"m") if method.name == "ModelInfer" else b""
                    for what, message in messages(method.input_type, lambda c: c, method.name):
                        answer, error = ask(channel, path, method, begin + message)
                        echo = (
                            len(message) if what.endswith(".id") else 0
                        )  # clients find their requests by it
                        assert len(answer) < LONGEST_ERROR + echo, f"{what}: {len(answer)} bytes"
                        assert len(error) < MOST_ANSWER, f"{what}: {error[:200]}"
    check(server, before)


def ask(channel: grpc.Channel, path: str, method: Any, message: bytes) -> tuple[bytes, str]:
    """The first answer to a message, and the text of the status where it is an error."""
    try:
        if method.server_streaming:
            stream = channel.stream_stream(path) if method.client_streaming else channel.unary_stream(path)
            call = stream(iter([message])) if method.client_streaming else stream(message)  # type: ignore[arg-type]
            return next(call, b""), ""
        return channel.unary_unary(path)(message), ""
    except grpc.RpcError as error:
        assert error.code() is not grpc.StatusCode.INTERNAL, error.details()
        return b"", f"{error.code().name}: {error.details()}"


@pytest.mark.parametrize("verb", ["logging", "repository_load", "openai_chat", "generate"])
def test_values_of_a_document_are_counted(server: ServerProcess, verb: str) -> None:
    with Http1(server.http) as http:
        reply = http.request("POST", DOCUMENTS[verb][0], b'{"x":[' + b",".join([b"0"] * MOST_VALUES) + b"]}")
    assert reply.status == 400 and b"'the document' has more than 131072 values" in reply.body
