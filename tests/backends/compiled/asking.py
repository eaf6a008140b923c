"""The model configurations of the probe, and requests that say what it is to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.http as http

TEXT = (
    'backend: "probe" max_batch_size: 8 input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ] output [ '
)
TEXT += '{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ] '
ONE = "instance_group [ { count: 1 kind: KIND_CPU } ] "


def numbers(*values: int, name: str = "IN") -> http.InferInput:
    array = np.array([values], np.int32)
    made = http.InferInput(name, list(array.shape), "INT32")
    made.set_data_from_numpy(array)
    return made


def asked(client: Any, what: str, model: str = "probe", **more: Any) -> Any:
    return client.infer(model, [numbers(5)], parameters={"do": what}, **more)


def text_of(client: Any, what: str, **more: Any) -> str:
    return str(asked(client, what, **more).as_numpy("TEXT")[0, 0].decode())
