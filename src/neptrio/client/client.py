"""Inference calls over a Connection: arrays in, arrays out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from neptrio import datatypes
from neptrio.addresses import parts_of
from neptrio.client.connection import Call, Connection, ConnectionLost
from neptrio.codec.descriptors import message_class
from neptrio.request.numpy_tensor import join_bytes, split_bytes

Inputs = Mapping[str, np.ndarray]
Parameters = Mapping[str, bool | int | float | str]


class InferenceError(Exception):
    """The server refused or failed a request. `status` is the gRPC status number, None on a stream."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SequenceBroken(Exception):
    """The sequence cannot go on: it is over, or its connection was lost and with it what the server kept for it."""


@dataclass(frozen=True)
class Result:
    """One response: its outputs as numpy arrays by name. BYTES outputs are object arrays of bytes."""

    id: str
    model_name: str
    model_version: str
    outputs: dict[str, np.ndarray]
    parameters: dict[str, Any] = field(default_factory=dict)


def encode_array(name: str, array: np.ndarray) -> tuple[str, bytes]:
    """The datatype of an input and its bytes. Raises TypeError."""
    dtype = datatypes.from_numpy(array.dtype)
    if not dtype:
        raise TypeError(f"input '{name}' has the dtype {array.dtype}, which the protocol does not have")
    raw = join_bytes(array.reshape(-1)) if dtype == datatypes.BYTES else array.tobytes()
    return datatypes.NAME[dtype], raw


def decode_array(datatype: str, shape: Iterable[int], raw: bytes) -> np.ndarray:
    """An output of its bytes."""
    number = datatypes.NUMBER[datatype]
    if number == datatypes.BYTES:
        array = np.empty(len(elements := split_bytes(raw)), dtype=object)
        array[:] = elements
    else:
        array = np.frombuffer(raw, datatypes.NUMPY[number])
    return array.reshape(tuple(shape))


def encode(
    model: str,
    inputs: Inputs,
    *,
    version: str = "",
    id: str = "",
    outputs: Iterable[str] = (),
    parameters: Parameters | None = None,
) -> bytes:
    """The bytes of a ModelInferRequest. `inputs` are arrays by name, `outputs` the names of those that are wanted: none for all."""
    request = message_class("inference.ModelInferRequest")()
    request.model_name = model
    request.model_version = version
    request.id = id
    for key, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[
            type(value)
        ]
        if kind == "int64_param" and int(value) >= 1 << 63:
            kind = "uint64_param"
        setattr(request.parameters[key], kind, value)
    for name, given in inputs.items():
        array = np.asarray(given)
        datatype, raw = encode_array(name, array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    for name in outputs:
        request.outputs.add(name=name)
    return bytes(request.SerializeToString())


def decode(response: Any) -> Result:
    """A ModelInferResponse message as a Result."""
    outputs = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        outputs[tensor.name] = decode_array(tensor.datatype, tensor.shape, raw)
    parameters = {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in response.parameters.items()}
    return Result(response.id, response.model_name, response.model_version, outputs, parameters)


class Stream:
    """A ModelStreamInfer call. send() and receive() may be used by different tasks."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def send(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        id: str = "",
        outputs: Iterable[str] = (),
        parameters: Parameters | None = None,
    ) -> None:
        """Sends a request; `outputs` are the names of those that are wanted, none for all. Raises ConnectionLost."""
        await self._call.send(
            encode(model, inputs, version=version, id=id, outputs=outputs, parameters=parameters)
        )

    async def receive(self) -> Result | None:
        """The next response, None at the end of the stream.

        Raises InferenceError for a response that is an error, after which the stream goes on, and ConnectionLost.
        """
        raw = await self._call.receive()
        if raw is None:
            if self._call.status:
                raise InferenceError(self._call.message, self._call.status)
            return None
        message = message_class("inference.ModelStreamInferResponse").FromString(raw)
        if message.error_message:
            raise InferenceError(message.error_message)
        return decode(message.infer_response)

    async def finish(self) -> None:
        """Tells the server that no more requests follow. Those that were sent are still answered."""
        await self._call.finish()


class Sequence:
    """One sequence on a stream of its own: ids, flags and order are taken care of.

    A sequence lives in the server's memory. When its connection is lost it is not started again behind
    your back: send() raises SequenceBroken, and you decide.
    """

    def __init__(self, stream: Stream, model: str, sequence_id: int | str, version: str) -> None:
        self.id = sequence_id
        self.sent = 0
        self.ended = False
        self._stream = stream
        self._model = model
        self._version = version
        self._broken = ""
        self._lock = trio.StrictFIFOLock()

    async def send(
        self,
        inputs: Inputs,
        *,
        last: bool = False,
        id: str = "",
        outputs: Iterable[str] = (),
        parameters: Parameters | None = None,
    ) -> Result:
        """Sends the next request and returns its response; `last` ends the sequence, `outputs` names those that are wanted.

        Concurrent callers are served in the order in which they called. Raises InferenceError when the
        server refuses or fails this request, SequenceBroken when the sequence is over or out of reach.
        """
        async with self._lock:
            if self._broken:
                raise SequenceBroken(self._broken)
            if self.ended:
                raise SequenceBroken(f"sequence {self.id!r} of '{self._model}' has ended: open a new one")
            place = {
                **(parameters or {}),
                "sequence_id": self.id,
                "sequence_start": self.sent == 0,
                "sequence_end": last,
            }
            try:
                await self._stream.send(
                    self._model, inputs, version=self._version, id=id, outputs=outputs, parameters=place
                )
                result = await self._stream.receive()
            except InferenceError as error:
                if "must specify the START flag" in str(error) and self.sent:
                    self._broken = (
                        f"the server has forgotten sequence {self.id!r} of '{self._model}' after {self.sent} requests "
                        "(idle for too long, or ended there): open a new one"
                    )
                    raise SequenceBroken(self._broken) from error
                raise
            except ConnectionLost as error:
                raise self._lost(str(error)) from error
            except trio.Cancelled:
                self._broken = f"a request of sequence {self.id!r} was cancelled midway: open a new one"
                raise
            if result is None:
                raise self._lost("the server ended the stream")
            self.sent += 1
            self.ended = last
            return result

    def _lost(self, why: str) -> SequenceBroken:
        self._broken = (
            f"sequence {self.id!r} of '{self._model}' lost its connection after {self.sent} requests ({why}); its "
            "state cannot be resumed here: open a new connection and start a new sequence"
        )
        return SequenceBroken(self._broken)

    async def run(self, requests: Iterable[Inputs]) -> AsyncIterator[Result]:
        """Sends every element, the last one with the end flag, and yields the responses in order."""
        iterator = iter(requests)
        try:
            current = next(iterator)
        except StopIteration:
            return
        for following in iterator:
            yield await self.send(current)
            current = following
        yield await self.send(current, last=True)


class Client:
    """Calls on one connection; made by open_client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        id: str = "",
        outputs: Iterable[str] = (),
        parameters: Parameters | None = None,
    ) -> Result:
        """One unary inference; `outputs` are the names of those that are wanted, none for all. Raises InferenceError, ConnectionLost."""
        request = encode(model, inputs, version=version, id=id, outputs=outputs, parameters=parameters)
        raw = await self.unary("ModelInfer", request)
        return decode(message_class("inference.ModelInferResponse").FromString(raw))

    async def unary(self, method: str, request: bytes) -> bytes:
        """Any unary call, from serialized request to serialized response. Raises InferenceError, ConnectionLost."""
        call = await self._connection.call(method)
        try:
            try:
                await call.send(request, True)
            except ConnectionLost:
                if call.status is None:  # else it was answered before it was sent
                    raise
            raw = await call.receive()
            if raw is not None:
                await call.receive()
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await call.cancel()
            raise
        if raw is None or call.status:
            raise InferenceError(call.message, call.status)
        return raw

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """A ModelStreamInfer call. Leaving the block ends it; requests that are not answered by then are cancelled."""
        call = await self._connection.call("ModelStreamInfer")
        try:
            yield Stream(call)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                try:
                    await call.cancel()
                except ConnectionLost:
                    pass

    @asynccontextmanager
    async def sequence(
        self, model: str, sequence_id: int | str | None = None, version: str = ""
    ) -> AsyncIterator[Sequence]:
        """A sequence with a new random integer id, or with the given id (a string if the model's CORRID is BYTES).

        Leave the block after send(..., last=True). A sequence that is left open ends in the server by its
        idle time, or at once if the model frees sequences on disconnect.
        """
        async with self.stream() as stream:
            yield Sequence(stream, model, sequence_id or secrets.randbits(62) + 1, version)


@asynccontextmanager
async def open_client(address: str) -> AsyncIterator[Client]:
    """Connects to HOST:PORT of a gRPC endpoint. Raises OSError, and ValueError for what is no such address."""
    try:
        parts = parts_of(address)
        if parts.port is None or parts.netloc != address:
            raise ValueError
    except ValueError:
        raise ValueError(f"'{address}' is no gRPC address: expected HOST:PORT or [IPV6]:PORT") from None
    stream = await trio.open_tcp_stream(parts.hostname or "", parts.port)
    connection = Connection(stream, address)
    try:
        async with trio.open_nursery() as nursery:
            await connection.start()
            nursery.start_soon(connection.run)
            yield Client(connection)
            nursery.cancel_scope.cancel()
    finally:
        await trio.aclose_forcefully(stream)
