"""The model configuration as models see it: look-ups, and ModelConfig for auto_complete_config."""

from __future__ import annotations

import copy
import json
from typing import Any

_INPUT_KEYS = {
    "name",
    "data_type",
    "dims",
    "optional",
    "allow_ragged_batch",
    "format",
    "reshape",
    "is_shape_tensor",
    "is_non_linear_format_io",
}
_OUTPUT_KEYS = {
    "name",
    "data_type",
    "dims",
    "reshape",
    "label_filename",
    "is_shape_tensor",
    "is_non_linear_format_io",
}


def _named(model_config: Any, kind: str, name: str) -> dict[str, Any] | None:
    if isinstance(model_config, (str, bytes)):
        model_config = json.loads(model_config)
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


class ModelConfig:
    """What auto_complete_config is given and returns: the configuration, to be completed.

    What the configuration file states stays; a model that states something else is an error.
    """

    def __init__(self, model_config: str | dict[str, Any]) -> None:
        self._config: dict[str, Any] = (
            json.loads(model_config)
            if isinstance(model_config, (str, bytes))
            else copy.deepcopy(model_config)
        )

    def as_dict(self) -> dict[str, Any]:
        """A copy of the configuration with what was added so far."""
        return copy.deepcopy(self._config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets max_batch_size. Raises ValueError when the configuration file asks for more."""
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 0:
            raise ValueError(f"max_batch_size must be an integer >= 0, got {max_batch_size!r}")
        stated = self._config.get("max_batch_size", 0)
        if stated > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {stated}, but in auto_complete_config function for model "
                f"'{self._config.get('name', '')}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turns dynamic batching on. Raises ValueError when another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"model '{self._config.get('name', '')}' is configured with {scheduler} and cannot be given "
                    "dynamic batching"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Sets {"decoupled": bool}. Raises ValueError for other keys or a contradiction."""
        unknown = set(transaction_policy_dict) - {"decoupled"}
        if unknown:
            raise ValueError(
                f"model transaction policy property in auto_complete_config function for model "
                f"'{self._config.get('name', '')}' contains property other than 'decoupled': {sorted(unknown)}"
            )
        wanted = bool(transaction_policy_dict.get("decoupled", False))
        stated = self._config.get("model_transaction_policy")
        if stated is not None and bool(stated.get("decoupled", False)) and not wanted:
            raise ValueError(
                "trying to change decoupled property in auto_complete_config for model "
                f"'{self._config.get('name', '')}', which is already set to 'True'."
            )
        self._config["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, input: dict[str, Any]) -> None:
        """Adds an input, or checks it against the one of that name. Raises ValueError."""
        self._add("input", input, _INPUT_KEYS)

    def add_output(self, output: dict[str, Any]) -> None:
        """Adds an output, or checks it against the one of that name. Raises ValueError."""
        self._add("output", output, _OUTPUT_KEYS)

    def _add(self, kind: str, row: dict[str, Any], allowed: set[str]) -> None:
        model = self._config.get("name", "")
        missing = {"name", "data_type", "dims"} - set(row)
        if missing:
            raise ValueError(
                f"{kind} in auto_complete_config function for model '{model}' is missing {sorted(missing)}"
            )
        unknown = set(row) - allowed
        if unknown:
            raise ValueError(
                f"{kind} '{row['name']}' in auto_complete_config function for model '{model}' contains unknown "
                f"properties {sorted(unknown)}"
            )
        row = dict(row, dims=[int(d) for d in row["dims"]])
        rows = self._config.setdefault(kind, [])
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
