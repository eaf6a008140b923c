"""The smallest request that a model takes, for people to paste: at the start of the server and on the page /docs; there also one of
zeros, for models that take images and the like. A model with sequences is sent one of a single request, and one that answers as
often as it likes is asked for a stream of answers."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from neptrio import datatypes

# datatype of a configuration -> a value of it as JSON; FP16 and BF16 have none
SAMPLES: Mapping[int, Any] = {1: True, **dict.fromkeys(range(2, 10), 1), 11: 1.0, 12: 1.0, 13: "hello"}
LONGEST_SAMPLE = 64  # elements of an input that still fit on a line
MOST_ZEROS = 16 << 20  # bytes that a command sends as zeros


def try_it(configs: Iterable[Any], rest: str) -> str:
    """A curl command that sends a request to one of the models, given their configurations and the URL of REST; "" where
    none takes a request as short as that. Models that take text come first: their answers explain themselves."""
    found = []
    for config in configs:
        body = None if _of_sequences(config) or _decoupled(config) else sample(config)
        if body is not None:
            short = len(json.dumps(body))
            text = any(i["datatype"] == "BYTES" for i in body["inputs"])
            echoes = config.name.startswith("identity")
            found.append(((echoes, not text, short, config.name), config.name, body))
    if not found:
        return ""
    _, name, body = min(found, key=lambda one: one[0])
    return curl(name, body, rest)


def curl(name: str, body: Any, rest: str, stream: bool = False) -> str:
    """The command that sends the request; whatever the names are, a shell takes them as they are."""
    return f"curl {_where(name, rest, stream)} -d {shlex.quote(json.dumps(body))}"


def _where(name: str, rest: str, stream: bool, save: str = "") -> str:
    verb, show = ("infer_stream", "-sN") if stream else ("infer", "-s")
    return f"{show}{save} {shlex.quote(f'{rest}/v2/models/{name}/{verb}')}"


def command(config: Any, rest: str) -> str:
    """A command that sends a request to the model; "" where that would have to be large."""
    body = sample(config)
    return _zeros(config, rest) if body is None else curl(config.name, body, rest, _decoupled(config))


def _zeros(config: Any, rest: str) -> str:
    """A command that sends zeros to a model whose inputs do not fit on a line or are of a type that JSON lacks: large tensors
    come as bytes behind the JSON. "" where the model would get more than MOST_ZEROS."""
    inputs, total = [], 0
    for tensor in config.input:
        if tensor.optional:
            continue
        shape = _smallest(config, tensor)
        # an element of BYTES is its length in four bytes, of an empty one nothing follows
        size = math.prod(shape) * (
            datatypes.TABLE[tensor.data_type][2].itemsize if tensor.data_type != datatypes.BYTES else 4
        )
        total += size
        inputs.append(
            {
                "name": tensor.name,
                "datatype": datatypes.TABLE[tensor.data_type][0],
                "shape": shape,
                "parameters": {"binary_data_size": size},
            }
        )
    if not inputs or total > MOST_ZEROS:
        return ""
    head = _request(config, inputs)
    save = ""
    if any(tensor.data_type in (datatypes.FP16, datatypes.BF16) for tensor in config.output):
        head["parameters"] = {**head.get("parameters", {}), "binary_data_output": True}
        save = " -o answer.bin"
    text = json.dumps(head)
    return (
        f"{{ printf %s {shlex.quote(text)}; head -c {total} /dev/zero; }} | "
        f"curl {_where(config.name, rest, _decoupled(config), save)} "
        f"-H 'Inference-Header-Content-Length: {len(text)}' --data-binary @-"
    )


def _decoupled(config: Any) -> bool:
    """Whether the model answers a request as often as it likes."""
    return bool(config.model_transaction_policy.decoupled)


def _of_sequences(config: Any) -> bool:
    """Whether the model's requests are parts of sequences."""
    return bool(config.WhichOneof("scheduling_choice") == "sequence_batching")


def _request(config: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The request with these inputs, which is a whole sequence where it has to be in one."""
    if not _of_sequences(config):
        return {"inputs": inputs}
    named = any(
        control.data_type == datatypes.BYTES
        for control_input in config.sequence_batching.control_input
        for control in control_input.control
    )
    place = {"sequence_id": "1" if named else 1, "sequence_start": True, "sequence_end": True}
    return {"parameters": place, "inputs": inputs}


def _smallest(config: Any, tensor: Any) -> list[int]:
    """The smallest shape that an input may have."""
    return [1] * (config.max_batch_size > 0) + [max(1, size) for size in tensor.dims]


def sample(config: Any) -> dict[str, Any] | None:
    """The smallest request that the model takes; None where it would not be short."""
    inputs = []
    for tensor in config.input:
        shape = _smallest(config, tensor)
        count = math.prod(shape)
        if tensor.optional:
            continue
        if tensor.data_type not in SAMPLES or count > LONGEST_SAMPLE:
            return None
        inputs.append(
            {
                "name": tensor.name,
                "datatype": datatypes.TABLE[tensor.data_type][0],
                "shape": shape,
                "data": [SAMPLES[tensor.data_type]] * count,
            }
        )
    return _request(config, inputs) if inputs else None
