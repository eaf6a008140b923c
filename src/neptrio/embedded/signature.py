"""Reads a function's signature as a model's inputs and outputs.

What an annotation says:

    Annotated[np.ndarray, TensorSpec("FP32", [-1, 4])]     datatype and shape
    npt.NDArray[np.float32]                                the datatype; the shape is [-1], unless inputs= says more
    str, bytes, int, float, bool                           one element: BYTES, BYTES, INT64, FP64, BOOL, shape [1]
    Context                                                no input: who asks, and how (at most one parameter)

A parameter with a default is an optional input, and so is one that may be None (`float | None`, Optional[float]), which is
what it is without a default when a client leaves it out. A result is one output called OUTPUT, a tuple OUTPUT0, OUTPUT1 and so
on, a TypedDict or NamedTuple has names; Iterator[...] and AsyncIterator[...] of these make the model decoupled.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.foreign import text_of

SCALARS: dict[type, str] = {str: "BYTES", bytes: "BYTES", int: "INT64", float: "FP64", bool: "BOOL"}
ITERATORS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model: `dtype` is a protocol datatype ("FP32", "BYTES") or a numpy dtype.

    `shape` is without the batch dimension, with -1 for any size. `scalar` is the Python type that the function takes
    or returns instead of an array.
    """

    dtype: Any
    shape: Sequence[int] = (-1,)
    name: str = ""
    optional: bool = False
    scalar: type | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # annotations of Optional[...] are hashed

    @property
    def number(self) -> int:
        """The datatype's number. Raises TypeError when there is none."""
        if isinstance(self.dtype, str) and self.dtype in datatypes.NUMBER:
            return datatypes.NUMBER[self.dtype]
        try:
            found = datatypes.from_numpy(np.dtype(self.dtype))
        except TypeError:
            found = 0
        if not found:
            raise TypeError(
                f"tensor '{self.name}': {self.dtype!r} is no datatype, expected one of "
                f"{', '.join(datatypes.NUMBER)} or a numpy dtype"
            )
        return found


class Context:
    """What a model's function can learn of the request. For functions that are called for each request alone."""

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        """The client's id for the request, "" if it gave none."""
        return str(self._request.request_id())

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's custom parameters."""
        return dict(self._request._parameters or {})

    @property
    def sequence_id(self) -> int | str:
        """The sequence that the request belongs to, 0 for none."""
        found: int | str = self._request.correlation_id()
        return found

    @property
    def sequence_start(self) -> bool:
        """Whether this is the first request of its sequence."""
        return bool(self._request.flags() & 1)

    @property
    def sequence_end(self) -> bool:
        """Whether this is the last request of its sequence."""
        return bool(self._request.flags() & 2)

    @property
    def cancelled(self) -> bool:
        """Whether the client does not want the response any more."""
        return bool(self._request.is_cancelled())


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns, as tensors."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    context: str = ""  # the parameter that gets the Context
    decoupled: bool = False
    asynchronous: bool = False
    none: tuple[str, ...] = ()  # optional inputs without a default: None when a request leaves them out


Tensors = Mapping[str, Any] | Sequence[TensorSpec]


def read(
    function: Callable[..., Any], inputs: Tensors | None, outputs: Tensors | None, name: str
) -> Signature:
    """The signature of a function or a class's __call__; `inputs` and `outputs` come before annotations.

    Raises TypeError saying what is missing.
    """
    called: Any = function.__call__ if inspect.isclass(function) else function
    if inspect.isclass(function) and not inspect.isfunction(called):  # every class can be called itself
        raise TypeError(
            f"model '{name}': class {function.__name__} needs a method __call__ that executes requests"
        )
    try:
        hints = typing.get_type_hints(called, include_extras=True)
    except Exception as error:
        raise TypeError(f"model '{name}': an annotation cannot be resolved: {text_of(error)}") from None
    parameters = list(inspect.signature(called).parameters.values())
    if inspect.isclass(function):
        parameters = parameters[1:]
    context = next((p.name for p in parameters if hints.get(p.name) is Context), "")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {
        p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != context
    }
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if positional:
        raise TypeError(
            f"model '{name}': inputs come by name, so '{positional[0]}' must not be positional-only"
        )
    if inputs is None:
        missing = [p for p in named if p not in hints]
        if missing or takes_any:
            what = f"parameter '{missing[0]}' has no annotation" if missing else "**parameters have no names"
            raise TypeError(f"model '{name}': {what}; annotate it, or say inputs=")
        taken = tuple(_spec(p, hints[p], f"model '{name}', parameter '{p}'") for p in named)
    else:
        taken = _given(inputs, f"model '{name}', inputs")
        if not takes_any:
            extra = [t.name for t in taken if t.name not in named]
            if extra:
                raise TypeError(f"model '{name}': the function has no parameter for input '{extra[0]}'")
            left = [n for n, p in named.items() if p.default is p.empty and n not in {t.name for t in taken}]
            if left:
                raise TypeError(f"model '{name}': inputs= lacks the function's parameter '{left[0]}'")
    taken = tuple(
        replace(
            t,
            optional=t.optional or (t.name in named and named[t.name].default is not inspect.Parameter.empty),
        )
        for t in taken
    )
    result = hints.get("return")
    decoupled = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    if outputs is not None:
        made = _given(outputs, f"model '{name}', outputs")
    elif result is None:
        raise TypeError(
            f"model '{name}': the function's result has no annotation; annotate it, or say outputs="
        )
    else:
        if decoupled and typing.get_origin(result) in ITERATORS:
            result = typing.get_args(result)[0]
        made = _results(result, f"model '{name}', result")
    asynchronous = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    none = tuple(
        t.name
        for t in taken
        if t.optional and t.name in named and named[t.name].default is inspect.Parameter.empty
    )
    return Signature(taken, made, context, decoupled, asynchronous, none)


def _results(hint: Any, where: str) -> tuple[TensorSpec, ...]:
    if typing.is_typeddict(hint) or (
        inspect.isclass(hint) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    ):
        names = typing.get_type_hints(hint, include_extras=True)
        return tuple(_spec(name, of, f"{where} '{name}'") for name, of in names.items())
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return tuple(_spec(f"OUTPUT{i}", part, f"{where} {i}") for i, part in enumerate(parts))
    return (_spec("OUTPUT", hint, where),)


def _given(tensors: Tensors, where: str) -> tuple[TensorSpec, ...]:
    """What inputs= or outputs= say: TensorSpecs with names, or name -> TensorSpec, (dtype, shape), dtype or type."""
    if isinstance(tensors, Mapping):
        found = []
        for name, said in tensors.items():
            if isinstance(said, TensorSpec):
                found.append(replace(said, name=name))
            elif isinstance(said, tuple):
                found.append(TensorSpec(said[0], tuple(said[1]), name))
            elif said in SCALARS:
                found.append(TensorSpec(SCALARS[said], (1,), name, scalar=said))
            else:
                found.append(TensorSpec(said, (-1,), name))
    else:
        found = list(tensors)
        if any(not spec.name for spec in found):
            raise TypeError(f"{where}: each TensorSpec needs a name")
    for spec in found:
        spec.number  # noqa: B018  # raises for what is no datatype
    return tuple(found)


def _spec(name: str, hint: Any, where: str) -> TensorSpec:
    """The tensor that an annotation means. Raises TypeError."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, TensorSpec):
            made = replace(extra, name=name)
            made.number  # noqa: B018  # raises for what is no datatype
            return made
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1 and len(kinds) < len(typing.get_args(hint)):
            return replace(_spec(name, kinds[0], where), optional=True)
    if hint in SCALARS:
        return TensorSpec(SCALARS[hint], (1,), name, scalar=hint)
    dtype = _dtype_of(hint)
    if dtype is not None:
        return TensorSpec(dtype, (-1,), name)
    raise TypeError(
        f"{where}: {hint!r} does not say a datatype; expected Annotated[np.ndarray, TensorSpec(...)], "
        "npt.NDArray[np.float32], str, bytes, int, float or bool, or one of these or None"
    )


def _dtype_of(hint: Any) -> np.dtype | None:
    """The dtype of npt.NDArray[...], None for anything else."""
    if typing.get_origin(hint) is not np.ndarray:
        return None
    of = typing.get_args(typing.get_args(hint)[1])
    try:
        return np.dtype(of[0]) if of and isinstance(of[0], type) else None
    except TypeError:
        return None
