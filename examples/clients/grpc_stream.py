"""Many requests on one gRPC stream: the model `mean`, answers by callback."""

from __future__ import annotations

import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
answers: queue.Queue = queue.Queue()

with grpcclient.InferenceServerClient(url) as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(5):
        values = np.full((1, 3), i, np.float32)
        tensor = grpcclient.InferInput("VALUES", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        client.async_stream_infer("mean", [tensor], request_id=str(i))
    for _ in range(5):
        result, error = answers.get(timeout=10)
        if error is not None:
            raise error
        print(result.get_response().id, result.as_numpy("MEAN")[0, 0])
    client.stop_stream()
