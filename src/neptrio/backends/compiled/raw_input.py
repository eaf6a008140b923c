"""What a raw input of a backend's request is: the model's configuration says its name, datatype and shape.

HTTP has the same for clients (cext/codec/json_request.pyx), where the model is at hand; here it is another process's.
"""

from __future__ import annotations

import math
from typing import Any


class CannotBeDeduced(ValueError):
    """The configuration leaves open what the input is."""


def deduced(config: dict[str, Any], size: int) -> tuple[str, int, list[int]]:
    """Name, number of the datatype and shape of an input of `size` bytes. A string's are without its length."""
    from neptrio import datatypes  # few backends ask, and ml_dtypes takes memory of each process

    inputs = config["input"]
    if len(inputs) != 1:
        raise CannotBeDeduced(
            f"a raw input is for models with one input: '{config['name']}' has {len(inputs)}"
        )
    (row,) = inputs
    name, datatype = row["name"], datatypes.FROM_CONFIG_NAME[row["data_type"]]
    dims = [int(dim) for dim in row["dims"]]
    batch = [1] if config["max_batch_size"] > 0 else []
    if datatype == datatypes.BYTES:
        if dims != [1]:
            raise CannotBeDeduced(
                f"a raw input of strings is one of shape [1]: input '{name}' has the shape {dims}"
            )
        return name, datatype, [*batch, 1]
    if dims.count(-1) > 1:
        raise CannotBeDeduced(
            f"the shape of the raw input '{name}' has more than one variable dimension: {dims}"
        )
    element = datatypes.ITEM_SIZE[datatype]
    known = element * math.prod(dim for dim in dims if dim >= 0)
    shape = [dim if dim >= 0 else size // known if known else 0 for dim in dims]
    if element * math.prod(shape) != size:
        raise CannotBeDeduced(f"{size} bytes are no tensor of the shape {dims} of the raw input '{name}'")
    return name, datatype, [*batch, *shape]
