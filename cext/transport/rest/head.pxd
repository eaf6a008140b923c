# What has been read of a request's head.
from libc.stdint cimport int64_t

cdef class RequestHead:
    cdef public bytes url
    cdef public list headers               # [(name, value)]  # type: list[tuple[bytes, bytes]]
    cdef public bytes header_length        # Inference-Header-Content-Length  # type: bytes | None
    cdef public bytes content_encoding  # type: bytes | None
    cdef public bytes accept_encoding  # type: bytes | None
    cdef public bytes expect  # type: bytes | None
    cdef public bytes host  # type: bytes | None
    cdef public int hosts                  # how many Host headers there were
    cdef public bytes origin               # Origin and Sec-Fetch-Site, which requests of web pages have  # type: bytes | None
    cdef public bytes fetch_site  # type: bytes | None
    cdef public bytes timing               # Neptrio-Timing  # type: bytes | None
    cdef public bint in_message            # a message has begun and is not complete
    cdef public bint head_complete
    cdef public bint chunked
    cdef public int64_t content_length     # -1 without Content-Length
    cdef public int64_t receive_start      # when the message's first byte came, CLOCK_MONOTONIC ns
    cdef int parts                         # in so many parts the message has come so far (fast_path, rule 6); 0: not in parts
    cdef public int64_t head_limit         # most bytes of URL and headers
    cdef int64_t head_bytes
