"""Compares a tensor with its recording: bit by bit, or within tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neptrio import datatypes


@dataclass(frozen=True)
class Difference:
    """One output that differs from its recording. `what` says how in words; the rest is empty where shapes differ.

    `index`, `expected` and `got` are of the first element that differs. `largest` is the largest absolute
    difference and `largest_at` its index (None for BYTES and BOOL, and where only NaN or infinity differ).
    """

    output: str
    what: str
    response: int = 0
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    differing: int = 0
    elements: int = 0
    largest: float | None = None
    largest_at: tuple[int, ...] = ()


def compare(
    output: str,
    expected: np.ndarray,
    got: np.ndarray,
    rtol: float = 0.0,
    atol: float = 0.0,
    full_shape: tuple[int, ...] | None = None,
) -> Difference | None:
    """None when `got` equals `expected`, which may be only the first elements of a tensor of shape `full_shape`.

    Without tolerances elements must have the same bits, except that all NaNs are equal. With them numbers may
    differ by atol + rtol * |expected|; BOOL and BYTES elements must always be equal.
    """
    if expected.dtype != got.dtype:
        return Difference(output, f"expected datatype {_name(expected)}, got {_name(got)}")
    shape = expected.shape if full_shape is None else full_shape
    if shape != got.shape:
        return Difference(output, f"expected shape {list(shape)}, got {list(got.shape)}")
    was, now = expected.reshape(-1), got.reshape(-1)[: expected.size]
    wrong = np.flatnonzero(~_same(was, now, rtol, atol))
    if not wrong.size:
        return None

    def place(at: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(at, shape))

    first = int(wrong[0])
    largest, largest_at = _largest(was, now, wrong)
    values = _show(was[first]), _show(now[first])
    text = f"{list(place(first))}: expected {values[0]}, got {values[1]}; {wrong.size} of {was.size} elements differ"
    if largest is not None and largest_at is not None:
        text += f", the most by {largest:g} at {list(place(largest_at))}"
    return Difference(output, text, 0, place(first), *values, int(wrong.size), int(was.size), largest,
                      place(largest_at) if largest_at is not None else ())  # fmt: skip


def _same(was: np.ndarray, now: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    if was.dtype.kind == "O":
        return np.fromiter((a == b for a, b in zip(was, now, strict=True)), dtype=bool, count=len(was))
    if was.dtype.kind == "b":
        return np.asarray(was == now)
    bits = np.dtype(f"u{was.dtype.itemsize}")
    same = np.ascontiguousarray(was).view(bits) == np.ascontiguousarray(now).view(bits)
    if was.dtype.kind in "iu":
        if rtol or atol:
            distance = np.abs(now.astype(np.longdouble) - was.astype(np.longdouble))
            same |= distance <= atol + rtol * np.abs(was.astype(np.longdouble))
        return same
    a, b = was.astype(np.float64), now.astype(np.float64)
    same |= np.isnan(a) & np.isnan(b)
    if rtol or atol:
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(b - a) <= atol + rtol * np.abs(a)
        same |= (near & np.isfinite(a) & np.isfinite(b)) | (a == b)
    return np.asarray(same)


def _largest(was: np.ndarray, now: np.ndarray, wrong: np.ndarray) -> tuple[float | None, int | None]:
    if was.dtype.kind in "Ob":
        return None, None
    wide = np.longdouble if was.dtype.kind in "iu" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(now[wrong].astype(wide) - was[wrong].astype(wide))
    finite = np.isfinite(distance)
    if not finite.any():
        return None, None
    at = int(np.argmax(np.where(finite, distance, -1)))
    return float(distance[at]), int(wrong[at])


def _name(array: np.ndarray) -> str:
    return datatypes.NAME.get(datatypes.from_numpy(array.dtype), str(array.dtype))


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, (bytes, bool)) else str(value)
    return text if len(text) <= 80 else text[:80] + "..."
