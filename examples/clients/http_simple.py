"""Sum and difference over HTTP: the model `simple`, with tritonclient.http."""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.http as httpclient

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)

with httpclient.InferenceServerClient(url) as client:
    inputs = []
    for name, array in (("INPUT0", a), ("INPUT1", b)):
        tensor = httpclient.InferInput(name, list(array.shape), "INT32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer("simple", inputs)
    print("sum       ", result.as_numpy("OUTPUT0")[0])
    print("difference", result.as_numpy("OUTPUT1")[0])
