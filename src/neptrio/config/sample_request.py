"""The smallest request that a model takes, for people to paste: at the start of the server and on the page /docs; there also one of
zeros, for models that take images and the like."""

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
        body = sample(config)
        if body is not None:
            short = len(json.dumps(body))
            text = any(i["datatype"] == "BYTES" for i in body["inputs"])
            echoes = config.name.startswith("identity")
            found.append(((echoes, not text, short, config.name), config.name, body))
    if not found:
        return ""
    _, name, body = min(found, key=lambda one: one[0])
    return curl(name, body, rest)


def curl(name: str, body: Any, rest: str) -> str:
    """The command that sends the request; whatever the names are, a shell takes them as they are."""
    return f"curl -s {shlex.quote(f'{rest}/v2/models/{name}/infer')} -d {shlex.quote(json.dumps(body))}"


def zeros(config: Any, rest: str) -> str:
    """A command that sends zeros to a model whose inputs do not fit on a line or are of a type that JSON lacks: large tensors
    come as bytes behind the JSON. "" where the model answers no single request, or would get more than MOST_ZEROS."""
    if _many_answers(config):
        return ""
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
    head: dict[str, Any] = {"inputs": inputs}
    save = ""
    if any(tensor.data_type in (datatypes.FP16, datatypes.BF16) for tensor in config.output):
        head["parameters"] = {"binary_data_output": True}
        save = " -o answer.bin"
    text = json.dumps(head)
    return (
        f"{{ printf %s {shlex.quote(text)}; head -c {total} /dev/zero; }} | "
        f"curl -s{save} {shlex.quote(f'{rest}/v2/models/{config.name}/infer')} "
        f"-H 'Inference-Header-Content-Length: {len(text)}' --data-binary @-"
    )


def _many_answers(config: Any) -> bool:
    """Whether the model answers no single request: it needs a sequence, or sends any number of responses."""
    decoupled = bool(config.model_transaction_policy.decoupled)
    return decoupled or config.WhichOneof("scheduling_choice") == "sequence_batching"


def _smallest(config: Any, tensor: Any) -> list[int]:
    """The smallest shape that an input may have."""
    return [1] * (config.max_batch_size > 0) + [max(1, size) for size in tensor.dims]


def sample(config: Any) -> dict[str, Any] | None:
    """The smallest request that the model takes; None where it answers no single request or it would not be short."""
    if _many_answers(config):
        return None
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
    return {"inputs": inputs} if inputs else None
