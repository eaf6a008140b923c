"""model_warmup: samples that every instance executes before the model is ready.

Samples run one after the other, each on all instances in parallel. They take the same way through batch, statistics
and errors as requests, so that what would delay or break a first request (lazy allocation, a kernel to compile,
a broken input) happens here. A sample that fails makes the load fail. Unlike requests, samples are nothing that an unload waits
for: it has given up the load that would.

A sample of a sequence model is one new sequence per place of the batch: control and state inputs that it does not
contain are added, those of START, END and READY with the ids 1, 2, ... and the initial state. It uses no slot, and
the state it produces is dropped.

Source: docs/protocol/features.md A4, docs/protocol/observed.md 10.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import trio

from neptrio import datatypes
from neptrio.config import paths
from neptrio.errors import InvalidArgument, TritonError, bare
from neptrio.execution.batch import accept
from neptrio.loop import threads
from neptrio.request.infer_request import InferRequest, InferResponse, Responder, Tensor, Timestamp
from neptrio.request.validate import validate

log = logging.getLogger("neptrio.warmup")


class _Outcome(Responder):
    """Waits for the requests of one execution and keeps the first error."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.error: TritonError | None = None
        self.done = trio.Event()

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if self.error is None and response.error is not None:
            self.error = response.error
        if final:
            request.model.inflight += 1  # which complete() takes back
            self.left -= 1
            if not self.left:
                self.done.set()


async def warm_up(model: Any, instances: Iterable[Any]) -> None:
    """Runs every sample of the model's configuration on these instances. Raises InvalidArgument with the reason."""
    for sample in model.config.model_warmup:
        if sample.batch_size == 0:
            log.info(
                "model '%s': warmup sample '%s' has batch_size 0 and is skipped", model.name, sample.name
            )
            continue
        failures: list[TritonError] = []
        try:
            inputs = await threads.run(_inputs, model, sample, abandon_on_cancel=True)
            async with trio.open_nursery() as nursery:
                for instance in instances:
                    nursery.start_soon(_run, model, sample, inputs, instance, failures)
        except TritonError as error:
            failures.append(bare(error))
        if failures:
            raise InvalidArgument(
                f"warmup sample '{sample.name}' of model '{model.name}' failed: {failures[0]}"
            )


async def _run(
    model: Any, sample: Any, inputs: list[Tensor], instance: Any, failures: list[TritonError]
) -> None:
    # scripts look for a Triton server's text, which is a verbose one, too
    log.debug("model '%s' instance %s is running warmup sample '%s'", model.name, instance.name, sample.name)
    for _ in range(max(sample.count, 1)):
        outcome = _Outcome(sample.batch_size)
        requests = []
        for number in range(sample.batch_size):
            request = InferRequest()
            request.model = model
            request.model_name = model.name
            request.id = f"{sample.name}-{number}"
            request.inputs = list(inputs)
            request.responder = outcome
            try:
                _check(request, model)
            except TritonError as error:
                failures.append(bare(error))
                return
            requests.append(request)
        for number, request in enumerate(requests):
            model.scheduler.complete_sample(request, number)
            accept(request)
            model.inflight -= 1  # it is not one of those that the model has to answer before it may end
            request.stamp(Timestamp.REQUEST_START)
            request.stamp(Timestamp.QUEUE_START, request.timestamp(Timestamp.REQUEST_START))
        instance.submit(requests, "warmup", 0)
        model.pass_soon()
        await outcome.done.wait()
        if outcome.error is not None:
            failures.append(outcome.error)
            return


def _check(request: InferRequest, model: Any) -> None:
    """Validates a request of a sample, which may also contain control and state inputs of a sequence model."""
    batching = model.config.sequence_batching
    controls = {c.name for c in batching.control_input} | {s.input_name for s in batching.state}
    inputs = request.inputs
    request.inputs = [tensor for tensor in inputs if tensor.name not in controls]
    validate(request, model)
    request.inputs = inputs


def _inputs(model: Any, sample: Any) -> list[Tensor]:
    """The input tensors of one request of the sample, batch size 1."""
    generator = np.random.default_rng(0)  # a fixed seed: the same sample at every load
    found = []
    for name, source in sorted(sample.inputs.items()):
        shape = ((1,) if model.max_batch_size else ()) + tuple(source.dims)
        found.append(Tensor(name, source.data_type, shape, _data(model, name, source, generator)))
    return found


def _data(model: Any, name: str, source: Any, generator: np.random.Generator) -> bytes:
    count = math.prod(source.dims)
    kind = source.WhichOneof("input_data_type")
    if kind == "input_data_file":
        path = paths.within(model.context.model_dir / "warmup", source.input_data_file)
        if path is None:
            raise InvalidArgument(
                f"input_data_file '{source.input_data_file}' of input '{name}' must stay within the model's "
                "folder warmup/"
            )
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"input_data_file of input '{name}' cannot be read: {error.strerror}: {path}"
            ) from None
    if kind is None:
        raise InvalidArgument(f"input '{name}' needs one of zero_data, random_data and input_data_file")
    if source.data_type == datatypes.BYTES:
        # empty strings, each a length of 0; also for random data, like a Triton server
        return bytes(4 * count)
    dtype = datatypes.NUMPY.get(source.data_type)
    if dtype is None:
        raise InvalidArgument(f"input '{name}' has no data_type")
    if kind == "zero_data":
        return bytes(dtype.itemsize * count)
    if dtype.kind in "iu":
        return generator.bytes(dtype.itemsize * count)
    if dtype.kind == "b":
        return generator.integers(0, 2, count, dtype=np.uint8).tobytes()
    return generator.random(count, dtype=np.float32).astype(dtype).tobytes()
