"""Requests that are nearly right: whatever stands in them, the server is never at fault.

Valid requests with hostile text, numbers of every size and members of wrong types in the places that take them.
The seeds are fixed; a longer search is a matter of more of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest

from tests.backends.python.models import config, python_model
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.rest.conftest import in_flight

REQUESTS = 1000  # for each seed
TEXTS = [
    b"", b"a", b"INPUT0", b"OUTPUT0", b"\\u0000", b"\xff", b"\xff\xfe", "é漢😀".encode(), b"\xed\xa0\x80",
    b"INPUT0\xff", b"x" * 5000, b'\\"', b"\\\\", b"\\n", b"%s%d{}", b"../../x", b"{0}", b"\xe2\x80\xae", b"\x7f",
    b"__class__", b"triton_x", b"headers", b"\xc0\x80", b"NaN", b"TIMESTAMPS", b"OFF", b"-1",
]  # fmt: skip
NUMBERS = [
    b"0", b"1", b"-1", b"1.5", b"1e308", b"NaN", b"-Infinity", b"4294967296", b"9223372036854775808",
    b"-9223372036854775809", b"18446744073709551615", b"18446744073709551616", b"9" * 400,
]  # fmt: skip
MODELS = {"pair": "INT32", "named": "INT32", "python": "BYTES", "cached": "INT32", "classes": "INT32"}
PARAMETERS = [b"sequence_id", b"sequence_start", b"priority", b"timeout", b"binary_data_output", b"k"]
ECHO = """
import json
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            json.loads(request.parameters()), request.request_id(), request.requested_output_names()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
CORRID = """sequence_batching { max_sequence_idle_microseconds: 1000000 control_input [ { name: "CORRID" control [
  { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ] }"""


class Fuzz:
    """One seed's requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> bytes:
        return b'"' + self.random.choice(TEXTS) + b'"'

    def value(self, depth: int = 0) -> bytes:
        """Any JSON value."""
        kind = self.random.randrange(4 if depth > 3 else 6)
        if kind == 0:
            return self.text()
        if kind < 3:
            return self.random.choice(NUMBERS)
        if kind == 3:
            return self.random.choice([b"true", b"false", b"null", b"[]", b"{}"])
        items = [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        if kind == 4:
            return b"[" + b",".join(items) + b"]"
        return b"{" + b",".join(self.text() + b":" + item for item in items) + b"}"

    def maybe(self, right: bytes, chance: float = 0.05) -> bytes:
        """`right`, or now and then something else."""
        return self.value() if self.random.random() < chance else right

    def members(self, *members: tuple[bytes, bytes]) -> bytes:
        """An object of most of these, sometimes with one more."""
        made = [
            b'"%s":%s' % (name, self.maybe(value)) for name, value in members if self.random.random() < 0.97
        ]
        if self.random.random() < 0.2:
            made.append(self.text() + b":" + self.value())
        self.random.shuffle(made)
        return b"{" + b",".join(made) + b"}"

    def infer(self, model: str) -> bytes:
        element = self.text() if MODELS[model] == "BYTES" else b"7"
        given = self.members(
            (b"name", b'"INPUT0"'), (b"datatype", b'"%s"' % MODELS[model].encode()), (b"shape", b"[1,1]"),
            (b"data", b"[" + element + b"]"),
        )  # fmt: skip
        wishes = [b"binary_data", b"classification", b"shared_memory_region", b"shared_memory_byte_size"]
        wish = self.members((self.random.choice(wishes), self.value()))
        output = self.members((b"name", self.maybe(b'"OUTPUT0"', 0.2)), (b"parameters", wish))
        chosen = self.random.sample(PARAMETERS, 2)
        parameters = self.members(*((name, self.value()) for name in chosen), (b"sequence_end", b"true"))
        extra = [(b"id", self.text()), (b"outputs", b"[" + output + b"]"), (b"parameters", parameters)]
        return self.members(
            (b"inputs", b"[" + given + b"]"), *self.random.sample(extra, self.random.randrange(4))
        )

    def request(self) -> tuple[str, str, bytes]:
        """(method, path, body)."""
        model = self.random.choice(list(MODELS))
        odd = quote_from_bytes(self.random.choice(TEXTS)[:100], safe="")
        kind = self.random.randrange(10)
        if kind < 5:
            return "POST", f"/v2/models/{model}/infer", self.infer(model)
        if kind == 5:
            verb = self.random.choice(["generate", "generate_stream"])
            body = self.members((b"INPUT0", self.text()), (b"id", self.text()), (b"parameters", self.value()))
            return "POST", f"/v2/models/python/{verb}", body
        if kind == 6:
            names = [
                b"trace_level",
                b"trace_rate",
                b"trace_count",
                b"log_frequency",
                b"trace_mode",
                b"trace_file",
            ]
            where = self.random.choice(["", f"/models/{model}", f"/models/{odd}"])
            return (
                "POST",
                f"/v2{where}/trace/setting",
                self.members((self.random.choice(names), self.value())),
            )
        if kind == 7:
            names = [b"log_info", b"log_error", b"log_format", b"log_file", b"log_verbose_level"]
            return "POST", "/v2/logging", self.members((self.random.choice(names), self.value()))
        if kind == 8:
            config = self.members(
                (b"config", self.value()), (b"parameters", self.value()), (b"ready", self.value())
            )
            return (
                "POST",
                self.random.choice(["/v2/repository/index", "/v2/repository/models/pair/check"]),
                config,
            )
        paths = [
            f"/v2/models/{odd}", f"/v2/models/{odd}/config", f"/v2/models/{model}/versions/{odd}/ready",
            f"/v2/models/stats?{odd}={odd}", f"/v2/trace/recent?count={odd}", f"/v2/repository/models/{odd}",
            f"/v2/models/named/sequences/{odd}?{odd}={odd}", f"/v2/models/{odd}/errors",
            f"/v2/logging/recent?{odd}={odd}", f"/v2/logging/recent?after={odd}",
        ]  # fmt: skip
        return self.random.choice(["GET", "POST", "DELETE"]), self.random.choice(paths), b""


def write_models(repository: Path) -> None:
    """The models that the requests are for."""
    for name, extra in {"pair": "", "named": CORRID, "cached": "response_cache { enable: true }"}.items():
        write_model(repository, name, identity_config(dims="1", pairs=1, extra=extra))
    labels = identity_config(dims="1", pairs=1).replace(
        'name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'
    )
    write_model(repository, "classes", labels, {"labels.txt": "zero\none\n"})
    python_model(repository, "python", ECHO, config("INPUT0:TYPE_STRING:1", "OUTPUT0:TYPE_STRING:1", 8))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("fuzz")
    write_models(repository)
    folder = tmp_path_factory.mktemp("fuzz-traces")
    flags = (
        f"--trace-config=triton,file={folder / 't'}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1",
        f"--trace-dir={folder}",
        "--model-control-mode=explicit",
        "--load-model=*",
    )
    with ServerProcess(repository, "--cache-config=local,size=1000000", *flags) as process:
        yield process
        assert in_flight(process) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_server_is_never_at_fault(server: ServerProcess, seed: int) -> None:
    """No 500 but for an unknown parameter of a load call, which a Triton server calls its own; no traceback."""
    fuzz = Fuzz(seed)
    seen: dict[int, int] = {}
    client = Http1(server.http)
    try:
        for _ in range(REQUESTS):
            method, path, body = fuzz.request()
            reply = client.request(method, path, body)
            seen[reply.status] = seen.get(reply.status, 0) + 1
            assert reply.status < 500 or reply.status in (501, 503) or b"unknown load parameter" in reply.body, (
                method, path, body, reply.body,
            )  # fmt: skip
            if reply.status >= 400 and reply.body:
                assert json.loads(reply.body.decode("utf-8", "surrogateescape"))["error"]
            if reply.headers.get("connection") == "close":
                client.sock.close()
                client = Http1(server.http)
    finally:
        client.file.close()
        client.sock.close()
    # it is no test if everything is refused, or nothing is
    assert seen[200] > REQUESTS / 10 and seen[400] > REQUESTS / 10
