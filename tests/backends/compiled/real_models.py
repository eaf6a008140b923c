"""Models for the Python backend of a Triton server: what they can say of a request and do with it, as text."""

from __future__ import annotations

from pathlib import Path

from tests.support.datatypes import TYPES
from tests.support.repository import write_model

HEAD = """
import asyncio, json, threading
import numpy as np
import triton_python_backend_utils as pb

def request(model, array, **more):
    return pb.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb.Tensor("IN", np.array([array], np.int32))], **more)

def text(value):
    return pb.InferenceResponse([pb.Tensor("TEXT", np.array([[json.dumps(value)]], object))])

def out(response):
    if response.has_error():
        return "error: " + response.error().message()
    return [pb.get_output_tensor_by_name(response, "OUT").as_numpy().tolist()] if response.output_tensors() else []
"""

# `how` says what is done; the answer is the text of it
DOES = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = {k: v for k, v in args.items() if k not in ("model_config", "model_repository")}
        self.family = pb.MetricFamily(name="does_total", description="counted", kind=pb.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"a": "b"})

    def execute(self, requests):
        return [self.one(r) for r in requests]

    def one(self, r):
        parameters = json.loads(r.parameters())
        how = parameters["how"]
        if how == "fail":
            return pb.InferenceResponse(error=pb.TritonError("told", getattr(pb.TritonError, parameters["code"])))
        return text(getattr(self, how)(r))

    def says(self, r):
        return [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), sorted(r.requested_output_names()),
                json.loads(r.parameters()), r.is_cancelled()]

    def arguments(self, r):
        return self.args

    def calls(self, r):
        async def both():
            return await asyncio.gather(request("double", [1, 2]).async_exec(), request("double", [3]).async_exec(),
                                        request("double", [-1]).async_exec(), request("nobody", [1]).async_exec())
        found = []
        for one in asyncio.run(both()):
            found.append("error" if one.has_error() else out(one))
        return found

    def streams(self, r):
        async def both():
            found = []
            for one in await asyncio.gather(*(request("count", [n]).async_exec(decoupled=True) for n in (3, 0, 2))):
                found.append([out(each) for each in one])
            return found
        return asyncio.run(both())

    def threads(self, r):
        box = []
        threads = [threading.Thread(target=lambda n=n: box.append(out(request("double", [n]).exec()))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(box)

    def large(self, r):
        response = request("double", [7] * 300_000).exec()
        array = pb.get_output_tensor_by_name(response, "OUT").as_numpy()
        return [list(array.shape), int(array.sum())]

    def ready(self, r):
        # loading and unloading is left out: now and then that ends the library's process, in tritonserver, too
        return [pb.is_model_ready("spare"), pb.is_model_ready("double"), pb.is_model_ready("double", "1"),
                pb.is_model_ready("double", "2"), pb.is_model_ready("nobody")]

    def counts(self, r):
        self.metric.increment(2)
        return self.metric.value()
"""

# an event loop of its own: the calls of all requests of a batch are under way at once
ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        calls = [request("double", r.inputs()[0].as_numpy()[0].tolist()).async_exec() for r in requests]
        return [text(out(await call)) for call in calls]
"""

# executed again and again until what it holds of the sequence is used up
AGAIN = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        found = []
        for r in requests:
            id = r.correlation_id()
            given = int(pb.get_input_tensor_by_name(r, "IN").as_numpy()[0][0])
            if self.left.setdefault(id, given) > 0:
                self.left[id] -= 1
                r.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                found.append(None)
            else:
                found.append(text([self.left.pop(id), given]))
        return found
"""

EVERY = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUT" + t.name()[2:], t.as_numpy()) for t in r.inputs()]) for r in requests]
"""

SPEAKS = (
    'backend: "python" max_batch_size: 8 input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } '
    'output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } instance_group { kind: KIND_CPU } '
)


def write_models(folder: Path) -> None:
    """Puts them beside `double` and `count`, which they call."""
    write_model(folder, "does", SPEAKS, {"1/model.py": HEAD + DOES})
    write_model(folder, "async", SPEAKS + "dynamic_batching { }", {"1/model.py": HEAD + ASYNC})
    again = "sequence_batching { iterative_sequence: true } "
    write_model(folder, "again", SPEAKS + again, {"1/model.py": HEAD + AGAIN})
    rows = [
        ", ".join(f'{{ name: "{way}_{kind}" data_type: TYPE_{kind} dims: [ -1 ] }}' for kind in TYPES)
        for way in ("IN", "OUT")
    ]
    every = f'backend: "python" max_batch_size: 8 input [ {rows[0]} ] output [ {rows[1]} ] '
    write_model(folder, "every", every, {"1/model.py": HEAD + EVERY})
