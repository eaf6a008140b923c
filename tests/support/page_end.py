"""Bytes placed at the end of accessible memory: code that reads one byte too many is ended by a signal.

Run as a program, `python -m tests.support.page_end NAME` passes to one reader of the compiled modules all its
texts, and every prefix of each, placed directly before an inaccessible page. Ends with status 0, or by a signal.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.codec.json_reader import load
from neptrio.codec.json_request import decode_request as decode_json
from neptrio.codec.json_tensor import tensor_of
from neptrio.codec.proto_request import decode_request as decode_protobuf
from neptrio.codec.protobuf import well_formed
from neptrio.errors import TritonError
from neptrio.request.infer_request import InferRequest, ModelCore
from neptrio.transport.grpc.message_stream import GrpcStream

PROT_NONE = 0


class PageEnd:
    """Pages of memory followed by an inaccessible one."""

    def __init__(self, room: int) -> None:
        self._room = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._room + mmap.PAGESIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        closed = ctypes.c_void_p(self._start + self._room)
        if libc.mprotect(closed, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes) -> memoryview:
        """The bytes, at the end of the accessible memory; valid until the next call."""
        if len(data) > self._room:
            raise ValueError(f"{len(data)} bytes do not fit into {self._room}")
        place = (ctypes.c_ubyte * len(data)).from_address(self._start + self._room - len(data))
        ctypes.memmove(place, data, len(data))
        return memoryview(place).cast("B")


# ---------------------------------------------------------------- texts


def json_bodies() -> Iterator[bytes]:
    """Infer requests, whole and cut off at every byte; numbers of every form at the very end."""
    head = b'{"inputs":[{"name":"I","shape":[1,3],"datatype":"%s","data":['
    whole = [
        b'\xef\xbb\xbf{"id":"a\\u00e9\\ud83d\\ude00\\n","inputs":[{"name":"I","shape":[1,2],"datatype":"BYTES","data":["x","y"]}]}',
        b'{"inputs":[{"name":"I","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":0}}],"outputs":'
        b'[{"name":"O","parameters":{"binary_data":true,"classification":3,"shared_memory_region":"r",'
        b'"shared_memory_offset":1,"shared_memory_byte_size":2}}],"parameters":{"sequence_id":7,"x":1.5e-3,"y":null}}',
        b'{"inputs":[{"name":"I","datatype":"BOOL","shape":[1],"data":[true,false]}]}',
    ]
    filler = b"1.5,-2,  3e1,\n" * 8
    for body in whole:
        yield from (body[:n] for n in range(len(body) + 1))
    for datatype in (b"FP32", b"FP64", b"INT32", b"INT64", b"UINT8", b"INT16"):
        start = head % datatype
        for number in NUMBERS:
            for before in (b"", filler, b"7," * 40):
                text = start + before + number
                yield from (text[: len(text) - n] for n in range(min(len(number) + 2, 40)))
    for key in (b"id", b"inputs", b"outputs", b"parameters", b"x"):
        yield b'{"%s":' % key
        yield b'{"%s"' % key
    for key in (b"name", b"shape", b"datatype", b"data", b"parameters"):
        yield b'{"inputs":[{"%s":' % key
        yield b'{"outputs":[{"%s":' % key
    yield b'{"inputs":[{"name":"I","datatype":"FP32","data":[1],"shape":'
    yield b'{"inputs":[{"name":"I","datatype":"FP32","shape":[1],"data":'
    yield b'{"inputs":[{"parameters":{"shared_memory_region":'
    yield b'{"outputs":[{"name":"O","parameters":{"shared_memory_region":'


NUMBERS = [
    b"0." + b"0" * 100,
    b"0." + b"0" * 56,
    b"-0." + b"0" * 64 + b"]}",
    b"0" * 100,
    b"0.0e" + b"0" * 80,
    b"1e" + b"9" * 80,
    b"1e-" + b"1" * 80,
    b"1" * 100,
    b"-" + b"1" * 70 + b".",
    b"1." + b"9" * 90 + b"E+",
    b"12345678." + b"12345678" * 9,
    b" " * 100,
    b"1," + b" " * 63,
    b"-" * 70,
    b"NaN,-Infinity,Inf",
    b"-I" + b" " * 64,
]


def protobuf_bodies() -> Iterator[bytes]:
    """ModelInferRequests with all fields, whole and cut off; and lengths that exceed the message."""
    from tritonclient.grpc import service_pb2

    raw = service_pb2.ModelInferRequest(model_name="m", model_version="1", id="x")
    raw.inputs.add(name="I", datatype="FP32", shape=[1, 2])
    raw.raw_input_contents.append(np.zeros(2, np.float32).tobytes())
    raw.parameters["a"].string_param = "b"
    raw.parameters["c"].double_param = 1.5
    raw.parameters["sequence_id"].int64_param = 3
    output = raw.outputs.add(name="O")
    output.parameters["classification"].int64_param = 2
    output.parameters["shared_memory_region"].string_param = "r"
    output.parameters["shared_memory_byte_size"].int64_param = 2
    typed = service_pb2.ModelInferRequest(model_name="m")
    for datatype, field, value in (
        ("BOOL", "bool_contents", True),
        ("INT8", "int_contents", -1),
        ("INT64", "int64_contents", -(1 << 63)),
        ("UINT16", "uint_contents", 60000),
        ("UINT64", "uint64_contents", 1 << 63),
        ("FP32", "fp32_contents", 1.0),
        ("FP64", "fp64_contents", 2.0),
        ("BYTES", "bytes_contents", b"xyz"),
    ):
        made = typed.inputs.add(name="I", datatype=datatype, shape=[1, 3])
        getattr(made.contents, field).extend([value] * 3)
    for body in (raw.SerializeToString(), typed.SerializeToString()):
        yield from (body[:n] for n in range(len(body) + 1))
        for at in range(len(body)):
            for change in (0x7F, 0x80, 0xFF):
                yield body[:at] + bytes([change]) + body[at + 1 :]


def http2_pieces() -> Iterator[bytes]:
    """The first bytes of a connection, a preface and frames, cut off at every byte."""
    from hpack import Encoder

    block = Encoder().encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/x"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", "1S"),
            ("x-long", "y" * 300),
        ]
    )
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    data += len(block).to_bytes(3, "big") + b"\1\4\0\0\0\1" + block
    data += b"\0\0\x0a\0\1\0\0\0\1" + b"\0\0\0\0\5hello"
    yield from (data[:n] for n in range(len(data) + 1))


def grpc_messages() -> Iterator[bytes]:
    """gRPC messages with their frame headers, cut off at every byte."""
    data = b"\0\0\0\0\0" + b"\0\0\0\0\5hello" + b"\1\0\0\0\2hi"
    yield from (data[:n] for n in range(len(data) + 1))


# ---------------------------------------------------------------- readers

MODEL = ModelCore("m", "1")


def read_json(body: memoryview) -> None:
    for header_length in (None, len(body), len(body) // 2):
        request = InferRequest()
        request.model_name = "m"
        request.model = MODEL
        decode_json(request, body, header_length)


def read_document(body: memoryview) -> None:
    load(body)


def read_numbers(body: memoryview) -> None:
    at = bytes(body).rfind(b"[")
    for name in ("FP32", "FP64", "INT8", "INT64", "UINT32"):
        if at >= 0:
            tensor_of("I", datatypes.NUMBER[name], (1, 3), body[at:])


def read_protobuf(body: memoryview) -> None:
    decode_protobuf(InferRequest(), body)


def read_fields(body: memoryview) -> None:
    well_formed(body)


class Quiet(GrpcStream):
    """A call that ignores everything."""

    def on_refused(self) -> None:
        pass


def read_http2(body: memoryview) -> None:
    from neptrio.transport.http2.nghttp2_session import Session

    session = Session(lambda session, stream_id, path, headers: Quiet(session, stream_id, headers))
    session.receive(body)
    session.data_to_send()
    session.connection_lost()


class Silent:
    """A session that sends nothing."""

    def __init__(self) -> None:
        from neptrio.transport.http2.stream import Account

        self.account = Account()

    def output_ready(self, stream: Any) -> None:
        pass


def read_messages(body: memoryview) -> None:
    Quiet(Silent(), 1, None).receive(body)


READERS: dict[str, tuple[Callable[[memoryview], None], Callable[[], Iterator[bytes]]]] = {
    "json": (read_json, json_bodies),
    "document": (read_document, json_bodies),
    "numbers": (read_numbers, json_bodies),
    "protobuf": (read_protobuf, protobuf_bodies),
    "fields": (read_fields, protobuf_bodies),
    "http2": (read_http2, http2_pieces),
    "messages": (read_messages, grpc_messages),
}


def main(name: str) -> None:
    """Passes all texts to one reader; prints how many there were."""
    read, texts = READERS[name]
    place = PageEnd(1 << 16)
    count = 0
    for text in texts():
        count += 1
        try:
            read(place.put(text))
        except TritonError:
            pass
        except Exception as error:
            raise AssertionError(f"{name} of {text!r}") from error
    print(count)


if __name__ == "__main__":
    faulthandler.enable()
    main(sys.argv[1])
