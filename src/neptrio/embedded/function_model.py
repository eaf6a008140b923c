"""Runs a function as a Python model: requests in, calls of the function, responses out.

Rules:
 1. A request gets exactly one response or error of the function, or for a generator its items and then the end.
 2. With batching, requests that have the same inputs are one call. If it fails, each of them gets the error.
 3. A coroutine whose requests are all cancelled is cancelled; an ordinary function goes on, and its result is dropped.
 4. What the function raises is the client's error: a neptrio.TritonError with its code, anything else as INTERNAL with
    the exception's name and text, and its traceback in the log. For callers in the same process it is the error's
    __cause__.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import numpy as np

import triton_python_backend_utils as utils
from neptrio import datatypes
from neptrio.embedded.functions import find
from neptrio.embedded.signature import Context, TensorSpec
from neptrio.errors import Cancelled, InvalidArgument, TritonError, settled
from neptrio.foreign import summary, type_name

LOOK_SECONDS = 0.1  # how often a coroutine's requests are looked at
FINAL = utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
log = logging.getLogger("neptrio.python")


def model_class(key: str, app: str, name: str) -> type:
    """The TritonPythonModel for a function. Raises LookupError."""
    signature = find(key, app, name).signature
    base: type[_Base]
    if signature.decoupled:
        base = _AsyncGenerator if signature.asynchronous else _Generator
    else:
        base = _Async if signature.asynchronous else _Plain
    return type("TritonPythonModel", (base,), {"_where": (key, app, name)})


class _Failure(utils.TritonError):
    """An error that knows what the function has raised, for callers in the same process."""

    __slots__ = ("cause",)
    cause: Exception


class _Base:
    """What all four have in common."""

    _where: tuple[str, str, str]

    def _begin(self) -> None:
        self._model = find(*self._where)
        self._signature = self._model.signature
        self._required = frozenset(
            t.name for t in self._signature.inputs if not t.optional and t.name not in self._signature.none
        )
        function = self._model.function
        self._function: Any = function() if inspect.isclass(function) else function

    def _end(self) -> None:
        close = getattr(self._function, "close", None) if inspect.isclass(self._model.function) else None
        if close is not None:
            close()

    def _arguments(self, request: Any) -> dict[str, Any]:
        """The function's arguments for one request. Raises InvalidArgument."""
        given: dict[str, Any] = dict.fromkeys(self._signature.none)
        for spec in self._signature.inputs:
            tensor = utils.get_input_tensor_by_name(request, spec.name)
            if tensor is not None:
                array = tensor.as_numpy()
                given[spec.name] = array if spec.scalar is None else _scalar(array, spec)
        if self._signature.context:
            given[self._signature.context] = Context(request)
        return given

    def _whole(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments. Raises InvalidArgument where an input is missing that is not optional: a request with as many
        others as there must be passes admission, as on a Triton server."""
        if not self._required <= arguments.keys():
            names = ",".join(f"'{name}'" for name in sorted(self._required - arguments.keys()))
            raise InvalidArgument(
                f"missing required input(s) [{names}] for model '{self._model.name}'. Please provide all required input(s)."
            )
        return arguments

    def _outputs(self, result: Any) -> list[tuple[TensorSpec, np.ndarray]]:
        """The function's result as arrays. Raises TypeError."""
        specs = self._signature.outputs
        if isinstance(result, Mapping):
            values = [(spec, result[spec.name]) for spec in specs if spec.name in result]
            unknown = set(result) - {spec.name for spec in specs}
            if unknown:
                raise TypeError(f"the function returned '{min(unknown)}', which is no output of the model")
        elif len(specs) == 1:
            values = [(specs[0], result)]
        elif isinstance(result, (tuple, list)) and len(result) == len(specs):
            values = list(zip(specs, result, strict=True))
        else:
            raise TypeError(
                f"expected a result for {len(specs)} outputs ({', '.join(s.name for s in specs)}), "
                f"got {type_name(result)}"
            )
        return [(spec, _array(spec, value)) for spec, value in values]

    def _response(self, result: Any) -> Any:
        return utils.InferenceResponse(
            [utils.Tensor(spec.name, array) for spec, array in self._outputs(result)]
        )

    def _failed(self, error: Exception) -> Any:
        return utils.InferenceResponse([], self._error(error))

    def _error(self, error: Exception) -> Any:
        if isinstance(error, TritonError):
            said = settled(error)
            made = _Failure(
                said.message, getattr(utils.TritonError, said.code.name, utils.TritonError.INTERNAL)
            )
        else:
            log.error("the function of model '%s' failed", self._model.name, exc_info=error)
            made = _Failure(summary(error))
        made.cause = error
        return made

    @staticmethod
    def _sent(request: Any, sender: Any, response: Any) -> bool:
        """Sends one of several responses; False when the client does not want more."""
        if request.is_cancelled():
            return False
        try:
            sender.send(response)
        except Exception:
            if not request.is_cancelled():
                raise
            return False  # cancelled a moment ago: no failure of the function
        return True

    def _batches(self, requests: list[Any]) -> Iterator[tuple[list[int], dict[str, np.ndarray], list[int]]]:
        """Requests with the same inputs: their places, the joined inputs, and how many rows each has."""
        groups: dict[tuple[str, ...], list[int]] = {}
        given = [self._arguments(request) for request in requests]
        for place, arguments in enumerate(given):
            groups.setdefault(
                tuple(name for name, array in arguments.items() if array is not None), []
            ).append(place)
        for names, places in groups.items():
            joined = given[places[0]]
            if len(places) > 1:
                joined = joined | {
                    name: np.concatenate([given[place][name] for place in places]) for name in names
                }
            yield places, joined, [len(given[place][names[0]]) if names else 1 for place in places]

    def _split(self, result: Any, rows: list[int]) -> list[Any]:
        """A batch's result as responses. Raises TypeError."""
        outputs = self._outputs(result)
        for spec, array in outputs:
            if array.ndim == 0 or len(array) != sum(rows):
                raise TypeError(
                    f"output '{spec.name}' must have a row for each of the batch's {sum(rows)}, it has shape "
                    f"{list(array.shape)}"
                )
        ends = np.cumsum([0, *rows])
        return [
            utils.InferenceResponse(
                [utils.Tensor(spec.name, array[ends[i] : ends[i + 1]]) for spec, array in outputs]
            )
            for i in range(len(rows))
        ]


class _OffLoop(_Base):
    """Functions that run on the instance's thread."""

    def initialize(self, args: dict[str, str]) -> None:
        self._begin()

    def finalize(self) -> None:
        self._end()


class _OnLoop(_Base):
    """Functions that run on an event loop, on which a class is made and closed, too: what it opens belongs to that loop."""

    async def initialize(self, args: dict[str, str]) -> None:
        self._begin()

    async def finalize(self) -> None:
        self._end()


class _Plain(_OffLoop):
    """A function."""

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        if self._model.batched:
            for places, joined, rows in self._batches(requests):
                try:
                    made = self._split(self._function(**self._whole(joined)), rows)
                except Exception as error:
                    made = [self._failed(error)] * len(places)
                for place, response in zip(places, made, strict=True):
                    responses[place] = response
            return responses
        for place, request in enumerate(requests):
            try:
                responses[place] = self._response(self._function(**self._whole(self._arguments(request))))
            except Exception as error:
                responses[place] = self._failed(error)
        return responses


async def _unless_cancelled(coroutine: Coroutine[Any, Any, Any], requests: list[Any]) -> Any:
    """What the coroutine returns. It is cancelled when all its requests are: nobody reads the result, and it may wait long."""
    task = asyncio.ensure_future(coroutine)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            if all(request.is_cancelled() for request in requests):
                task.cancel()
                await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        raise
    try:
        return task.result()
    except asyncio.CancelledError:
        raise Cancelled from None


class _Async(_OnLoop):
    """An `async def` function: the requests of a batch run at the same time."""

    async def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        if self._model.batched:
            batches = self._batches(requests)
            await asyncio.gather(
                *(self._batch(responses, [requests[i] for i in batch[0]], *batch) for batch in batches)
            )
        else:
            await asyncio.gather(*(self._one(responses, i, r) for i, r in enumerate(requests)))
        return responses

    async def _batch(
        self,
        responses: list[Any],
        requests: list[Any],
        places: list[int],
        joined: dict[str, np.ndarray],
        rows: list[int],
    ) -> None:
        try:
            made = self._split(await _unless_cancelled(self._function(**self._whole(joined)), requests), rows)
        except Exception as error:
            made = [self._failed(error)] * len(places)
        for place, response in zip(places, made, strict=True):
            responses[place] = response

    async def _one(self, responses: list[Any], place: int, request: Any) -> None:
        try:
            result = await _unless_cancelled(
                self._function(**self._whole(self._arguments(request))), [request]
            )
            responses[place] = self._response(result)
        except Exception as error:
            responses[place] = self._failed(error)


class _Generator(_OffLoop):
    """A generator: a response for each item."""

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                items = self._function(**self._whole(self._arguments(request)))
                try:
                    for item in items:
                        if not self._sent(request, sender, self._response(item)):
                            break
                finally:
                    items.close()
            except Exception as error:
                sender.send(self._failed(error), flags=FINAL)
            else:
                sender.send(flags=FINAL)


class _AsyncGenerator(_OnLoop):
    """An asynchronous generator: a response for each item, and the requests of a batch run at the same time."""

    async def execute(self, requests: list[Any]) -> None:
        await asyncio.gather(*(self._one(request) for request in requests))

    async def _each(self, request: Any, sender: Any) -> None:
        """All items of a request in one task, to which the generator's contexts, time limits and groups belong."""
        items = self._function(**self._whole(self._arguments(request)))
        try:
            async for item in items:
                if not self._sent(request, sender, self._response(item)):
                    break
        finally:
            await items.aclose()

    async def _one(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            await _unless_cancelled(self._each(request, sender), [request])
        except Exception as error:
            sender.send(self._failed(error), flags=FINAL)
        else:
            sender.send(flags=FINAL)


def _scalar(array: np.ndarray, spec: TensorSpec) -> Any:
    """The one element of an input. Raises InvalidArgument."""
    if array.size != 1:
        raise InvalidArgument(f"input '{spec.name}' must have one element, it has shape {list(array.shape)}")
    value = array.reshape(-1)[0]
    if spec.scalar is str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"input '{spec.name}' is no UTF-8 text: {error}") from None
    return value if spec.scalar is bytes else value.item()


def _array(spec: TensorSpec, value: Any) -> np.ndarray:
    """An output as an array of its datatype. Raises TypeError."""
    wanted = datatypes.NUMPY[spec.number]
    if spec.scalar is not None:
        value = [value]
    if spec.number == datatypes.BYTES:
        return np.asarray(value, dtype=object)
    array = np.asarray(value)
    if array.dtype == wanted:
        return array
    try:
        return array.astype(wanted, casting="same_kind", copy=False)
    except TypeError:
        raise TypeError(
            f"output '{spec.name}' is {datatypes.NAME[spec.number]}, the function returned {array.dtype}"
        ) from None
