"""Text that is not Unicode, in every string of every JSON body: refused in clear words, or passed through.

Bytes that are no UTF-8 and the halves of surrogate pairs that JSON can spell (`\\ud800`) go wherever a
string stands. Nothing of it is the server's failure: no 500, no traceback (the servers' ends look for
those), no request that waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.python.models import config, isolated, python_model
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.rest.conftest import Connect

BYTES = [b"\xff", b"\xed\xa0\x80", b"x\xc0\x80", b"\xf8\x88\x80\x80\x80"]
IDS = ["no-lead", "half-pair", "overlong", "five-bytes"]
HALF = "The surrogate pair in string is invalid."
ROW = b'"shape":[1,16],"datatype":"INT32","data":[' + b",".join([b"7"] * 16) + b"]"
GOOD = b'{"name":"INPUT0",' + ROW + b'},{"name":"INPUT1",' + ROW + b"}"

# where the text stands in a body for the model `simple`, and the error; None: it passes through
INFER = {
    "output": (b'{"inputs":[%s],"outputs":[{"name":"@"}]}', b"unexpected inference output '@' for model 'simple'"),
    "second-output": (
        b'{"inputs":[%s],"outputs":[{"name":"OUTPUT0"},{"name":"@"}]}',
        b"unexpected inference output '@' for model 'simple'",
    ),
    "input": (
        b'{"inputs":[{"name":"@",' + ROW + b'},{"name":"INPUT1",' + ROW + b"}]}",
        b"unexpected inference input '@' for model 'simple'",
    ),
    "datatype": (
        b'{"inputs":[{"name":"INPUT0","shape":[1,16],"datatype":"@","data":[1]}]}',
        b"invalid datatype for input INPUT0",
    ),
    "id": (b'{"id":"@","inputs":[%s]}', None),
    "parameter-name": (b'{"parameters":{"@":1},"inputs":[%s]}', None),
    "parameter": (b'{"parameters":{"k":"@"},"inputs":[%s]}', None),
    "sequence-id": (b'{"parameters":{"sequence_id":"@"},"inputs":[%s]}', None),
    "unknown-member": (b'{"@":"@","inputs":[%s]}', None),
}  # fmt: skip


@pytest.mark.parametrize("raw", BYTES, ids=IDS)
@pytest.mark.parametrize("place", INFER)
def test_bytes_that_are_no_text_in_an_infer_request(connect: Connect, place: str, raw: bytes) -> None:
    body, error = INFER[place]
    body = body.replace(b"%s", GOOD).replace(b"@", raw)
    reply = connect().request("POST", "/v2/models/simple/infer", body)
    if error is None:
        assert reply.status == 200, reply.body
        assert (b'"id":"' + raw + b'"' in reply.body) == (place == "id")
    else:
        assert reply.status == 400
        assert error.replace(b"@", raw) in reply.body


@pytest.mark.parametrize("place", INFER)
def test_half_a_surrogate_pair_in_an_infer_request(connect: Connect, place: str) -> None:
    body = INFER[place][0].replace(b"%s", GOOD).replace(b"@", b"\\ud800")
    reply = connect().request("POST", "/v2/models/simple/infer", body)
    assert reply.status == 400
    assert HALF in json.loads(reply.body)["error"]


CONTROL = {
    "trace-value": ("/v2/trace/setting", b'{"trace_rate":["@"]}', 400),
    "trace-level": ("/v2/trace/setting", b'{"trace_level":{"@":1}}', 400),
    "trace-body": ("/v2/trace/setting", b'["@"]', 400),
    "trace-number": ("/v2/models/simple/trace/setting", b'{"trace_count":"@"}', 400),
    "trace-file": ("/v2/trace/setting", b'{"trace_file":"/@/x"}', 400),
    "trace-name": ("/v2/trace/setting", b'{"@":"1"}', 200),
    "log-value": ("/v2/logging", b'{"log_info":"@"}', 400),
    "log-format": ("/v2/logging", b'{"log_format":"@"}', 503),
    "log-body": ("/v2/logging", b'["@"]', 400),
    "index": ("/v2/repository/index", b'{"ready":"@"}', 400),
    "check-config": ("/v2/repository/models/simple/check", b'{"config":{"@":1}}', 200),
    "check-member": ("/v2/repository/models/simple/check", b'{"config":{"name":"@"}}', 200),
    "check-text": ("/v2/repository/models/simple/check", b'{"parameters":{"config":"{\\"@\\":1}"}}', 200),
    "generate": ("/v2/models/text/generate", b'{"INPUT0":7,"@":[]}', 400),
    "generate-parameter": ("/v2/models/text/generate", b'{"INPUT0":"@","id":"@","@":"@"}', 200),
}  # fmt: skip


@pytest.mark.parametrize("raw", BYTES, ids=IDS)
@pytest.mark.parametrize("place", CONTROL)
def test_bytes_that_are_no_text_in_other_bodies(connect: Connect, place: str, raw: bytes) -> None:
    path, body, status = CONTROL[place]
    reply = connect().request("POST", path, body.replace(b"@", raw))
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    if place.startswith("check"):
        assert b"not valid Unicode" in reply.body


@pytest.mark.parametrize("raw", BYTES, ids=IDS)
def test_names_in_a_configuration_must_be_unicode(connect: Connect, raw: bytes) -> None:
    for text in (raw, b"\\\\ud800"):  # what the parameter holds is JSON again
        body = b'{"parameters":{"config":"{\\"input\\":[{\\"name\\":\\"@\\"}]}"}}'.replace(b"@", text)
        reply = connect().request("POST", "/v2/repository/models/simple/check", body)
        assert reply.status == 200
        assert "not valid Unicode" in reply.body.decode("utf-8", "surrogateescape")


ECHO = """
import json
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            json.loads(request.parameters())
            request.request_id(), request.correlation_id(), request.requested_output_names()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
TEXT = config("INPUT0:TYPE_STRING:1", "OUTPUT0:TYPE_STRING:1")
NAMED = """sequence_batching { control_input [ { name: "CORRID" control [
  { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ] }"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("hostile-text")
    write_model(repository, "named", identity_config("TYPE_STRING", "1", 0, 1, NAMED))
    python_model(repository, "inside", ECHO, TEXT)
    isolated(repository, "apart", ECHO, TEXT)
    with ServerProcess(repository, "--allow-client-shm=true") as process:
        yield process


@pytest.mark.parametrize("raw", BYTES, ids=IDS)
@pytest.mark.parametrize("model", ["named", "inside", "apart"])
def test_models_are_given_what_came(models: ServerProcess, model: str, raw: bytes) -> None:
    """As the id of the request and of its sequence, in a parameter and in a tensor."""
    body = (
        b'{"id":"@","parameters":{"sequence_id":"@","sequence_start":true,"sequence_end":true,"@":"@"},'
        b'"inputs":[{"name":"INPUT0","shape":[1],"datatype":"BYTES","data":["@"]}],"outputs":[{"name":"OUTPUT0"}]}'
    )
    with Http1(models.http) as client:
        reply = client.request("POST", f"/v2/models/{model}/infer", body.replace(b"@", raw))
        assert reply.status == 200, reply.body
        assert b'"id":"' + raw + b'"' in reply.body and b'"data":["' + raw + b'"]' in reply.body


@pytest.mark.parametrize("raw", BYTES, ids=IDS)
def test_names_of_regions(models: ServerProcess, raw: bytes) -> None:
    tensor = b'"inputs":[{"name":"INPUT0","shape":[1],"datatype":"BYTES","data":["x"]}]'
    region = b'"parameters":{"shared_memory_region":"@","shared_memory_byte_size":64}'
    unknown = b"Unable to find shared memory region: '@'"
    bodies = {
        b'{%s,"outputs":[{"name":"OUTPUT0",%s}]}' % (tensor, region): ("models/inside/infer", 404, unknown),
        b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"BYTES",%s}]}' % region: (
            "models/inside/infer",
            404,
            unknown,
        ),
        # 500 is what a Triton server says of a key that is not there
        b'{"key":"/@","offset":0,"byte_size":1}': ("systemsharedmemory/region/r/register", 500, b"'/@'"),
    }
    with Http1(models.http) as client:
        for body, (path, status, error) in bodies.items():
            reply = client.request("POST", f"/v2/{path}", body.replace(b"@", raw))
            assert (reply.status, error.replace(b"@", raw) in reply.body) == (status, True), reply.body
