"""Arrays in, arrays out: what a caller in the same process gives and gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from neptrio import datatypes
from neptrio.errors import InvalidArgument
from neptrio.foreign import text_of
from neptrio.request.infer_request import InferResponse, Tensor
from neptrio.request.numpy_tensor import from_numpy, to_numpy


class Response(Mapping[str, np.ndarray]):
    """A model's response: output name -> array.

    Arrays of numbers are read-only views of the model's memory, which lives as long as they do. BYTES outputs are
    object arrays of bytes. Both are made when they are first asked for.
    """

    def __init__(self, response: InferResponse) -> None:
        self.model_name = response.model_name
        self.model_version = response.model_version
        self.id = response.id
        self.parameters: dict[str, Any] = dict(response.parameters or {})
        self._tensors = {tensor.name: tensor for tensor in response.outputs or ()}
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._arrays.get(name)
        if found is None:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise KeyError(f"no output {name!r}, the response has {list(self._tensors)}")
            found = self._arrays[name] = to_numpy(tensor)
            if tensor.dtype != datatypes.BYTES:
                found.flags.writeable = False  # a cache or another caller may have the same memory
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{t.name}: {datatypes.NAME[t.dtype]} {list(t.shape)}" for t in self._tensors.values()
        )
        return f"<Response of {self.model_name} {self.model_version}: {outputs}>"


def tensors(inputs: Mapping[str, Any], wanted: Mapping[str, Wanted]) -> list[Tensor]:
    """Input tensors over the memory of the caller's arrays, which are copied only if they are not contiguous.

    What is no array (a list, a number) becomes one of the datatype that the model wants, and one element a tensor of the
    model's shape where that has one element. Raises InvalidArgument for what is no tensor.
    """
    made = []
    for name, value in inputs.items():
        of = wanted.get(name) or Wanted(0, None)
        try:
            array = _array(value, of.dtype)
            if array.ndim == 0 and of.one is not None:
                array = array.reshape(of.one)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"input '{name}' cannot become an array{_of(of.dtype)}: {text_of(error)}"
            ) from None
        made.append(from_numpy(name, array))
    return made


class Wanted(NamedTuple):
    """What a model wants of an input: the datatype's number, 0 if it is not known, and the shape if that has one element."""

    dtype: int
    one: tuple[int, ...] | None


def _array(value: Any, wanted: int) -> np.ndarray:
    if value is None:
        raise TypeError("got None; leave out an optional input that is not given")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError("some of its elements are masked, and tensors have no masks; use filled()")
    if isinstance(value, (np.ndarray, np.generic)):
        return _full(np.asarray(value))
    if hasattr(value, "__array__"):
        return _full(np.asarray(value))
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    if wanted == datatypes.BYTES:
        return _full(np.array(value, dtype=object))
    array = np.asarray(value, dtype=datatypes.NUMPY[wanted] if wanted else None)
    if array.dtype == bool or (array.dtype.kind == "f" and np.isnan(array).any()):
        _refuse_none(value)  # which numpy has made False, or nan
    return _full(array)


def _full(array: np.ndarray) -> np.ndarray:
    """The array. Raises TypeError when one of its elements is None, which no datatype has."""
    if array.dtype == object and any(element is None for element in array.flat):
        raise TypeError("an element is None")
    return array


def _refuse_none(value: Any) -> None:
    if value is None:
        raise TypeError("an element is None")
    if isinstance(value, (list, tuple)):
        for element in value:
            _refuse_none(element)


def _of(dtype: int) -> str:
    return f" of {datatypes.NAME[dtype]}" if dtype else ""
