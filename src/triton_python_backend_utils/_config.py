"""The model configuration as models see it: look-ups, and ModelConfig for auto_complete_config."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Iterable
from typing import Any

from . import _checks
from ._types import DATA_TYPES as _DATA_TYPES

_INPUT_KEYS = (
    "name",
    "data_type",
    "dims",
    "optional",
    "allow_ragged_batch",
    "format",
    "reshape",
    "is_shape_tensor",
    "is_non_linear_format_io",
)
_OUTPUT_KEYS = (
    "name",
    "data_type",
    "dims",
    "reshape",
    "label_filename",
    "is_shape_tensor",
    "is_non_linear_format_io",
)


def _named(model_config: Any, kind: str, name: str) -> dict[str, Any] | None:
    if isinstance(model_config, (str, bytes)):
        model_config = json.loads(model_config)
    name = _checks.text(name, f"name of get_{kind}_config_by_name()")
    for row in model_config.get(kind, ()):
        if row["name"] == name:
            found: dict[str, Any] = row
            return found
    return None


def get_input_config_by_name(model_config: Any, name: str) -> dict[str, Any] | None:
    """The configuration of the input of that name, None when there is none."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: Any, name: str) -> dict[str, Any] | None:
    """The configuration of the output of that name, None when there is none."""
    return _named(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Any) -> bool:
    """True when the configuration says that the model is decoupled."""
    if isinstance(model_config, (str, bytes)):
        model_config = json.loads(model_config)
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _checked(kind: str, row: Any, allowed: tuple[str, ...], model: str) -> list[int]:
    """The dims of an input or output that a model adds. Raises ValueError for what is missing, wrong or unknown."""
    where = f"in auto-complete-config function for model '{model}'"
    if not isinstance(row, dict):
        raise ValueError(f"{kind} {where} must be a dict, got {type(row).__name__}")
    who = f"{kind} '{row['name']}'" if "name" in row else kind
    unknown = sorted(set(map(str, row)) - set(allowed))
    if unknown:
        known = ", ".join(f"'{key}'" for key in allowed)
        raise ValueError(f"{who} {where} contains property other than {known}: '{unknown[0]}'")
    for key in ("name", "data_type", "dims"):
        if key not in row:
            raise ValueError(f"{who} {where} is missing '{key}' property.")
    for key in ("name", "data_type"):
        if not isinstance(row[key], str) or not row[key]:
            raise ValueError(f"{who} {where} has a '{key}' property that is no text: {row[key]!r}")
    if row["data_type"] not in _DATA_TYPES:
        raise ValueError(
            f"{who} {where} has a 'data_type' property that is no datatype: {row['data_type']!r}, expected one of "
            f"{', '.join(_DATA_TYPES)}"
        )
    dims = row["dims"]
    if isinstance(dims, (str, bytes)) or not isinstance(dims, Iterable):
        raise ValueError(f"{who} {where} has a 'dims' property that is no list of integers: {dims!r}")
    try:
        return [int(d) if isinstance(d, str) else operator.index(d) for d in dims]
    except (TypeError, ValueError):
        raise ValueError(
            f"{who} {where} has a 'dims' property that is no list of integers: {dims!r}"
        ) from None


class ModelConfig:
    """The configuration that auto_complete_config gets, completes and returns.

    The configuration file's values stay; it is an error if the model sets a different one.

    `version_directory` is the folder with the files of the version that is loaded, for models whose file tells what the
    configuration leaves out; "" where there is none. Models write to `_model_config`, too, for what no method sets: it has
    the name that it has on a Triton server.
    """

    def __init__(self, model_config: str | dict[str, Any], version_directory: str = "") -> None:
        self.version_directory = version_directory
        self._model_config: dict[str, Any] = (
            json.loads(model_config)
            if isinstance(model_config, (str, bytes))
            else copy.deepcopy(model_config)
        )

    def as_dict(self) -> dict[str, Any]:
        """A copy of the configuration with what was added so far."""
        return copy.deepcopy(self._model_config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets max_batch_size. Raises ValueError when the configuration file asks for more."""
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 0:
            raise ValueError(
                f"max_batch_size in auto-complete-config function for model '{self._model_config.get('name', '')}' must be an "
                f"integer >= 0, got {max_batch_size!r}"
            )
        stated = self._model_config.get("max_batch_size", 0)
        if stated > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {stated}, but in auto-complete-config function for model "
                f"'{self._model_config.get('name', '')}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turns dynamic batching on. Raises ValueError when another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"model '{self._model_config.get('name', '')}' is configured with {scheduler} and cannot be given "
                    "dynamic batching"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Sets {"decoupled": bool}. Raises ValueError for other keys or a contradiction."""
        where = f"in auto-complete-config function for model '{self._model_config.get('name', '')}'"
        if not isinstance(transaction_policy_dict, dict):
            raise ValueError(
                f"model transaction property {where} must be a dict, got {type(transaction_policy_dict).__name__}"
            )
        unknown = sorted(set(map(str, transaction_policy_dict)) - {"decoupled"})
        if unknown:
            raise ValueError(
                f"model transaction property {where} contains property other than 'decoupled': '{unknown[0]}'"
            )
        wanted = bool(transaction_policy_dict.get("decoupled", False))
        stated = self._model_config.get("model_transaction_policy")
        if stated is not None and bool(stated.get("decoupled", False)) and not wanted:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._model_config.get('name', '')}', which is already set to 'True'."
            )
        self._model_config["model_transaction_policy"] = {"decoupled": wanted}

    def set_parameter(self, key: str, value: str) -> None:
        """Gives a parameter a value where the configuration has none of that name; one that stands there stays."""
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"a parameter in auto-complete-config function for model '{self._model_config.get('name', '')}' must be two "
                f"texts, got {key!r} and {value!r}"
            )
        self._model_config.setdefault("parameters", {}).setdefault(key, {"string_value": value})

    def add_input(self, input: dict[str, Any]) -> None:
        """Adds an input, or checks it against the one of that name. Raises ValueError."""
        self._add("input", input, _INPUT_KEYS)

    def add_output(self, output: dict[str, Any]) -> None:
        """Adds an output, or checks it against the one of that name. Raises ValueError."""
        self._add("output", output, _OUTPUT_KEYS)

    def _add(self, kind: str, row: dict[str, Any], allowed: tuple[str, ...]) -> None:
        model = self._model_config.get("name", "")
        row = dict(row, dims=_checked(kind, row, allowed, model))
        rows = self._model_config.setdefault(kind, [])
        for stated in rows:
            if stated["name"] != row["name"]:
                continue
            if stated.get("data_type", "TYPE_INVALID") in ("TYPE_INVALID", ""):
                stated["data_type"] = row["data_type"]
            elif stated["data_type"] != row["data_type"]:
                raise ValueError(
                    f"unable to load model '{model}', configuration expects datatype {stated['data_type']} for {kind} "
                    f"'{row['name']}', model provides {row['data_type']}"
                )
            if not stated.get("dims"):
                stated["dims"] = row["dims"]
            elif [int(d) for d in stated["dims"]] != row["dims"]:
                raise ValueError(
                    f"unable to load model '{model}', configuration expects dims {stated['dims']} for {kind} "
                    f"'{row['name']}', model provides {row['dims']}"
                )
            for key, value in row.items():
                stated.setdefault(key, value)
            return
        rows.append(row)
