# What is known of the request whose head is being read.
from libc.stdint cimport int64_t

cdef class RequestHead:
    cdef public bytes url
    cdef public list headers               # [(name, value)]
    cdef public bytes header_length        # Inference-Header-Content-Length
    cdef public bytes content_encoding
    cdef public bytes accept_encoding
    cdef public bytes expect
    cdef public bytes host
    cdef public int hosts                  # how many Host headers came
    cdef public bytes origin               # Origin and Sec-Fetch-Site: of requests that a web page caused
    cdef public bytes fetch_site
    cdef public bint in_message            # begun and not complete
    cdef public bint head_complete
    cdef public bint chunked
    cdef public int64_t content_length     # -1 when not announced
    cdef public int64_t receive_start      # CLOCK_MONOTONIC ns of the message's first byte
    cdef public int64_t head_limit         # bytes of URL and headers
    cdef int64_t head_bytes
