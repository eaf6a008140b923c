"""Indices into InferRequest's timestamp array, by name (the order is that of cext/request.pxd)."""

from __future__ import annotations

from enum import IntEnum


class Stamp(IntEnum):
    """Points in a request's life; values are nanoseconds of CLOCK_MONOTONIC, 0 = not reached."""

    RECV_START = 0
    RECV_END = 1
    REQUEST_START = 2
    QUEUE_START = 3
    COMPUTE_START = 4
    COMPUTE_INPUT_END = 5
    COMPUTE_OUTPUT_START = 6
    COMPUTE_END = 7
    REQUEST_END = 8
    SEND_START = 9
    SEND_END = 10
    CACHE_LOOKUP_START = 11
    CACHE_LOOKUP_END = 12
    CACHE_INSERT_START = 13
    CACHE_INSERT_END = 14
    RESPONSE_COMPLETE = 15
