"""Settings that a program gives as keywords, read as the command's flags are: the flags are the one table of both.

Rules:
 1. A text is read by the flag of that name, so "false" is False and "explict" an error that names what is near.
 2. Any other value must be of the kind that the flag makes, and within its limits.
 3. A setting of a flag that may be repeated is one value or a list of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from neptrio import flags, serving
from neptrio.foreign import type_name

NUMBERS = (
    flags.port,
    flags.positive,
    flags.not_negative,
    flags.at_least_one,
    flags.frontends,
    flags.memory_budget,
)
FRACTIONS = (flags.seconds, flags.positive_seconds, flags.tolerance)


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as fields of Settings. Raises TypeError for an unknown name or kind, ValueError for a value."""
    actions = {action.dest: action for action in serving.parser()._actions}
    return {name: _setting(name, value, actions) for name, value in given.items()}


def _setting(name: str, value: Any, actions: Mapping[str, argparse.Action]) -> Any:
    action = actions.get(name)
    if action is None or action.help is argparse.SUPPRESS:
        near = flags.nearest(name, sorted(actions)).partition(";")[0]
        raise TypeError(f"Server has no setting '{name}'{near}")
    if name == "backend_config" and isinstance(value, Mapping):
        return _backends(value)
    if not isinstance(action, argparse._AppendAction):
        return None if value is None and action.default is None else _one(name, value, action)
    if isinstance(value, str) or not isinstance(value, Iterable) or _made_by(action.type, value):
        value = (value,)
    values = tuple(_one(name, one, action) for one in value)
    if name != "backend_config":
        return values
    made: dict[str, dict[str, str]] = {}
    for backend, key, text in values:
        made.setdefault(backend, {})[key] = text
    return made


def _made_by(kind: Any, value: Any) -> bool:
    """Whether a value is what that flag makes, and not several of them."""
    if kind is flags.memory_budget:
        return isinstance(value, flags.MemoryBudget)
    return kind is flags.resource and isinstance(value, tuple) and bool(value) and isinstance(value[0], str)


def _backends(value: Mapping[Any, Any]) -> dict[str, dict[str, str]]:
    for backend, settings in value.items():
        if not isinstance(backend, str) or not isinstance(settings, Mapping):
            raise TypeError(
                f"backend_config: expected a mapping of backends' names to mappings, got {backend!r}: {settings!r}"
            )
    return {backend: {str(key): _text(one) for key, one in said.items()} for backend, said in value.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one(name: str, value: Any, action: argparse.Action) -> Any:
    """One value, as the flag makes it."""
    kind: Any = action.type
    if isinstance(value, str):
        made = _read(name, value, kind)
    elif kind is flags.boolean:
        if not isinstance(value, bool):
            raise _wrong(name, "bool", value)
        made = value
    elif isinstance(value, flags.MemoryBudget):
        made = value
    elif kind in NUMBERS or kind is flags.verbosity:
        if not isinstance(value, Real) or isinstance(value, bool) or not float(value).is_integer():
            raise _wrong(name, "int", value)
        made = _read(name, f"{value:.0f}", kind)
    elif kind in FRACTIONS:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise _wrong(name, "a number", value)
        made = _read(name, str(float(value)), kind)
    elif kind is Path or kind is flags.repository:
        if not isinstance(value, os.PathLike):
            raise _wrong(name, "a path", value)
        made = Path(value)
    elif kind is None:  # a text; numbers have one
        if not isinstance(value, (Real, os.PathLike)) or isinstance(value, bool):
            raise _wrong(name, "str", value)
        made = str(value)
    else:
        made = value  # an AdminAddress, a Restriction, a mode: what the program made by itself
    if action.choices is not None and made not in action.choices:
        known = list(action.choices)
        near = flags.nearest(made, known)
        hint = near if "did you mean" in near else ""
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got '{made}'{hint}")
    return made


def _read(name: str, text: str, kind: Callable[[str], Any] | None) -> Any:
    try:
        return text if kind is None else kind(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _wrong(name: str, expected: str, value: Any) -> TypeError:
    return TypeError(f"{name}: expected {expected}, got {type_name(value)}")
