"""Strings over gRPC: the model `upper_case`, with tritonclient.grpc."""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as grpcclient

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
words = np.array([["hello", "grüße", "done"]], dtype=object)

with grpcclient.InferenceServerClient(url) as client:
    tensor = grpcclient.InferInput("TEXT", list(words.shape), "BYTES")
    tensor.set_data_from_numpy(words)
    result = client.infer("upper_case", [tensor], outputs=[grpcclient.InferRequestedOutput("UPPER")])
    print(*(element.decode() for element in result.as_numpy("UPPER")[0]))
