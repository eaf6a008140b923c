# The types of cext/observe/trace_sampler.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Mapping
from typing import Any

from neptrio.observe.trace import Trace, Tracing
from neptrio.observe.trace_recent import Recent
from neptrio.observe.trace_scope import Sampling
from neptrio.request.infer_request import InferRequest

class Sampler(Tracing):
    writer: Any
    recent: Recent
    models: Mapping[str, Sampling]
    default: Sampling
    open: int
    disabled: bool
    tracing: bool
    unread: bool
    trace_headers: bool
    may_force: bool
    spans: bool
    def prepare_root(
        self, trace: Trace, request: InferRequest, timestamps: bool, with_tensors: bool
    ) -> None: ...
