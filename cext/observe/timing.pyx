"""Times in answers: what a request's own queueing and computing took, told to the client that asks for it.

A client asks with the header or gRPC metadata `neptrio-timing: true`, or with the request's parameter `neptrio_timing`;
a model's configuration may say yes for all who do not say. The answer then has the parameters of NAMES, and over HTTP
the header Server-Timing. docs/statistics.md says what each of them measures.

Rules:
 1. request.timing is None (nobody asked), True or False (somebody said so), or a dict: what the last response was told.
 2. The times are those that the statistics count for this request, rounded no further than a nanosecond. They are read
    when a response is handed over, so that every transport, and models that call models, find the same ones.
 3. Whoever does not ask pays for one comparison with None.
 4. The wish is for the server: the model does not see the parameter, and steps of an ensemble do not inherit it.
"""
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport (
    CACHE_LOOKUP_END,
    CACHE_LOOKUP_START,
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    InferRequest,
    InferResponse,
    now_ns,
)

from neptrio.errors import InvalidArgument

WISH = "neptrio_timing"
HEADER = b"neptrio-timing"
# parameter of the answer -> metric name in Server-Timing; the durations are nanoseconds
NAMES = {
    "neptrio_queue_ns": "queue",
    "neptrio_input_ns": "input",
    "neptrio_compute_ns": "compute",
    "neptrio_output_ns": "output",
    "neptrio_cache_lookup_ns": "cache",
    "neptrio_batch_size": "batch",
}  # type: dict[str, str]
cdef dict _WORDS = {b"true": True, b"1": True, b"false": False, b"0": False}


def wish(bytes value) -> bool:
    """What the header or metadata `neptrio-timing` says. Raises InvalidArgument."""
    found = _WORDS.get(value.strip().lower())
    if found is None:
        text = value.decode("latin-1")
        raise InvalidArgument(f"the header 'neptrio-timing' must be 'true' or 'false', got '{text}'")
    return found


cdef int take_wish(InferRequest request) except -1:
    """Moves the wish from a request's parameters into request.timing. Raises InvalidArgument."""
    value = request.parameters.get(WISH)
    if value is None:
        return 0
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{WISH}' must be a boolean, got {value!r}")
    request.timing = value
    # a copy: the dict may be one that a program gave us and uses again
    request.parameters = {k: v for k, v in request.parameters.items() if k != WISH} or None
    return 0


cdef int tell(InferRequest request, InferResponse response, int64_t now) except -1:
    """Adds the times to a response of a request that may want them. `now`: the current time, 0 when it was not read."""
    cdef int64_t* s = request.timestamps
    cdef int64_t queue, end
    cdef dict told = {}
    if request.timing is False:
        return 0
    if not now:
        now = now_ns()
    if request.cache_hit:
        told["neptrio_queue_ns"] = max(0, s[<int>CACHE_LOOKUP_START] - s[<int>QUEUE_START])
        told["neptrio_cache_lookup_ns"] = max(0, s[<int>CACHE_LOOKUP_END] - s[<int>CACHE_LOOKUP_START])
    elif request.composing:
        queue = s[<int>COMPUTE_START] - s[<int>QUEUE_START] + request.steps_queue_ns
        told["neptrio_queue_ns"] = max(0, queue)
        told["neptrio_input_ns"] = request.steps_input_ns
        told["neptrio_compute_ns"] = request.steps_infer_ns
        told["neptrio_output_ns"] = request.steps_output_ns
    elif s[<int>COMPUTE_START]:
        end = s[<int>COMPUTE_END] or now
        told["neptrio_queue_ns"] = max(0, s[<int>COMPUTE_START] - s[<int>QUEUE_START])
        told["neptrio_input_ns"] = max(0, s[<int>COMPUTE_INPUT_END] - s[<int>COMPUTE_START])
        told["neptrio_compute_ns"] = max(0, s[<int>COMPUTE_OUTPUT_START] - s[<int>COMPUTE_INPUT_END])
        told["neptrio_output_ns"] = max(0, end - s[<int>COMPUTE_OUTPUT_START])
        if request.batch is not None:
            told["neptrio_batch_size"] = request.batch.size
    else:  # it ended in the queue, or another request's answer was its own (response cache)
        told["neptrio_queue_ns"] = max(0, now - s[<int>QUEUE_START]) if s[<int>QUEUE_START] else 0
    request.timing = told
    if response.error is None:
        response.parameters = {**(response.parameters or {}), **told}
    return 0


def timing_headers(InferRequest request not None) -> list:
    # type: (...) -> list[tuple[bytes, bytes]]
    """The headers of the request's last response: Server-Timing, or none if it was not asked for."""
    if type(request.timing) is not dict:
        return []
    parts = []
    for name, value in request.timing.items():
        if name == "neptrio_batch_size":
            parts.append(b'batch;desc="%d"' % value)
        else:
            parts.append(b"%b;dur=%.6f" % (NAMES[name].encode(), value / 1e6))  # Server-Timing counts milliseconds
    return [(b"server-timing", b", ".join(parts))]
