"""Blocks of trace records, and the text that they become in a trace file.

The problem: the text of a trace is a kilobyte of names and numbers, and making it on the loop would cost a tenth of a
small request. The choice: the loop copies the request's timestamps as they are into a block. The writer's thread makes
the text without the GIL, a chunk at a time, straight into the file, so that never more than a chunk of it is in memory.

Rules:
 1. A record is self-contained: it holds no pointers and no references.
 2. The timestamps of an object are in time order, equal ones in the order of the stages in TEXTS.
 3. A block belongs to whoever took it from its scope.
Source: docs/protocol/trace-file.md.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from neptrio.codec.bounded cimport add_char, add_text
from neptrio.observe.file_sink cimport Sink, flush_sink, put_text
from neptrio.request.infer_request cimport (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    GRPC_PROTOCOL,
    HTTP_PROTOCOL,
    QUEUE_START,
    RECV_END,
    RECV_START,
    REQUEST_END,
    REQUEST_START,
)

cdef enum Name:
    HTTP_RECV_START
    HTTP_RECV_END
    GRPC_WAITREAD_START
    GRPC_WAITREAD_END
    N_REQUEST_START
    N_QUEUE_START
    N_COMPUTE_START
    N_COMPUTE_INPUT_END
    N_COMPUTE_OUTPUT_START
    N_COMPUTE_END
    N_REQUEST_END
    INFER_RESPONSE_COMPLETE
    HTTP_SEND_START
    HTTP_SEND_END
    GRPC_SEND_START
    GRPC_SEND_END
    NAMES

TEXTS = (
    "HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START",
    "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "REQUEST_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_SEND_START",
    "GRPC_SEND_END",
)  # type: tuple[str, ...]

cdef enum:
    HEAD_BYTES = 48         # bytes of any name with the text around it, rounded up
    POINT_BYTES = 72        # bytes of a name, a number and brackets
    OBJECT_BYTES = 128      # bytes of ids, brackets and the list's name
    CHUNK_BYTES = 65536     # bytes of text made at once, and at most one object more
    FIRST_BYTES = 16384     # size of a new block
    TOO_LONG = -2

cdef char HEADS[16][48]
cdef Py_ssize_t HEAD_SIZES[16]
for _i in range(NAMES):
    _head = b'{"name":"%s","ns":' % TEXTS[_i].encode()
    HEAD_SIZES[_i] = len(_head)
    _head = _head.ljust(HEAD_BYTES)
    memcpy(HEADS[_i], PyBytes_AS_STRING(_head), HEAD_BYTES)

cdef char PAIRS[200]        # "00" "01" ... "99"
for _i in range(100):
    PAIRS[2 * _i] = 48 + _i // 10
    PAIRS[2 * _i + 1] = 48 + _i % 10


cdef Py_ssize_t record_size(const Record* record) noexcept nogil:
    return (sizeof(Record) + 24 * record.more + 16 * record.reported + record.head + record.rest + record.names + 7) & ~7


cdef Py_ssize_t text_room(const Record* record) noexcept nogil:
    return (OBJECT_BYTES + record.head + record.rest + record.names
            + (PLAIN + 3 * record.more + record.reported) * POINT_BYTES)


cdef class TraceBlock:
    """The records of finished traces; the writer's thread makes text of them."""

    def __cinit__(self):
        self.most = 1 << 62

    def __dealloc__(self):
        free(self.records.data)
        free(self.records.chunk)

    def __len__(self):
        """Bytes of the records, not of their text."""
        return self.records.size

    def clear(self):
        """Removes all records; keeps the memory."""
        self.records.size = 0
        self.traces = 0

    cdef char* reserve(self, Py_ssize_t n) except NULL:
        """Makes room for n bytes at the end; the caller fills them and adds n to `size`."""
        cdef Py_ssize_t room
        cdef char* data
        if self.records.size + n > self.room:
            room = max(2 * self.room, self.records.size + n, FIRST_BYTES)
            data = <char*>realloc(self.records.data, room)
            if data == NULL:
                raise MemoryError()
            self.records.data = data
            self.room = room
        return self.records.data + self.records.size

    def text(self) -> bytes:
        """The objects of all records, joined by commas."""
        cdef Py_ssize_t at = 0, n
        made = bytearray()
        while at < self.records.size:
            n = fill(&self.records, &at)
            if n == TOO_LONG:
                raise AssertionError("a trace's text is longer than the room that was made for it")
            if n < 0:
                raise MemoryError()
            made += (<char*>self.records.chunk)[:n]
        return bytes(made)


cdef Py_ssize_t fill(Records* r, Py_ssize_t* at) noexcept nogil:
    """Makes text of the records from `at` on, as many as fit into a chunk; returns its bytes, -1 = no memory,
    TOO_LONG = no text is as long as this one."""
    cdef Py_ssize_t used = 0, need
    cdef const Record* record
    cdef char* place
    cdef char* end
    while at[0] < r.size:
        record = <const Record*>(r.data + at[0])
        need = text_room(record)
        if need > r.room - used:
            if used:
                break
            free(r.chunk)
            r.room = need + CHUNK_BYTES
            r.chunk = <char*>malloc(r.room)
            if r.chunk == NULL:
                r.room = 0
                return -1
        place = r.chunk + used
        end = r.chunk + r.room
        if at[0]:
            place = add_text(place, end, b",\n", 2)
        place = render(record, place, end)
        if place == NULL:
            return -1
        if place >= end:
            return TOO_LONG
        used = place - r.chunk
        at[0] += record_size(record)
    return used


cdef int write_text(Records* records, Sink* sink) noexcept nogil:
    """Writes the objects of all records, joined by commas."""
    cdef Py_ssize_t at = 0, n
    cdef int failed = flush_sink(sink)
    while at < records.size and not failed:
        n = fill(records, &at)
        if n < 0:
            return -1
        put_text(sink, records.chunk, n)
        failed = flush_sink(sink)  # the next texts will lie where these do
    return failed


cdef int collect(const Record* r, const int64_t* more, Point* points) noexcept nogil:
    """Sorts the points by time; there is room for PLAIN, for three per further response and for the reported ones."""
    cdef int n = 0, i, j
    cdef int64_t* s = <int64_t*>r.timestamps
    cdef Point p
    if r.front == HTTP_PROTOCOL:
        n = put(points, n, s[<int>RECV_START], HTTP_RECV_START)
        n = put(points, n, s[<int>RECV_END], HTTP_RECV_END)
    elif r.front == GRPC_PROTOCOL:
        n = put(points, n, s[<int>RECV_START], GRPC_WAITREAD_START)
        n = put(points, n, s[<int>RECV_END], GRPC_WAITREAD_END)
    n = put(points, n, s[<int>REQUEST_START], N_REQUEST_START)
    n = put(points, n, s[<int>QUEUE_START], N_QUEUE_START)
    if not r.composing:
        n = put(points, n, s[<int>COMPUTE_START], N_COMPUTE_START)
        n = put(points, n, s[<int>COMPUTE_INPUT_END], N_COMPUTE_INPUT_END)
        n = put(points, n, s[<int>COMPUTE_OUTPUT_START], N_COMPUTE_OUTPUT_START)
        n = put(points, n, s[<int>COMPUTE_END], N_COMPUTE_END)
    n = put(points, n, s[<int>REQUEST_END], N_REQUEST_END)
    if r.made:
        n = answer(r, points, n, r.made, r.send_start, r.send_end)
    for i in range(r.more):
        n = answer(r, points, n, more[3 * i], more[3 * i + 1], more[3 * i + 2])
    for i in range(r.reported):
        n = put(points, n, more[3 * r.more + 2 * i], NAMES + i)
    for i in range(1, n):  # insertion sort, as they are nearly sorted
        if points[i].ns >= points[i - 1].ns:
            continue
        p = points[i]
        j = i
        while j and points[j - 1].ns > p.ns:
            points[j] = points[j - 1]
            j -= 1
        points[j] = p
    return n


cdef inline int answer(
    const Record* r, Point* points, int n, int64_t made, int64_t start, int64_t end
) noexcept nogil:
    if not r.answered_by_front:
        n = put(points, n, made, INFER_RESPONSE_COMPLETE)
    n = put(points, n, start, HTTP_SEND_START if r.front == HTTP_PROTOCOL else GRPC_SEND_START)
    return put(points, n, end, HTTP_SEND_END if r.front == HTTP_PROTOCOL else GRPC_SEND_END)


cdef inline int put(Point* points, int n, int64_t ns, int name) noexcept nogil:
    points[n].ns = ns
    points[n].name = name
    return n + (ns != 0)


cdef char* render(const Record* r, char* at, char* end) noexcept nogil:
    cdef Point plain[PLAIN + 1]  # one more than PLAIN, because put() writes before it counts
    cdef Point* points = plain
    cdef const int64_t* more = <const int64_t*>(<const char*>r + sizeof(Record))
    cdef const int64_t* own = more + 3 * r.more    # reported points
    cdef const char* texts = <const char*>(own + 2 * r.reported)
    cdef const char* names = texts + r.head + r.rest
    cdef int64_t first, last
    cdef uint64_t ns, upper, lower
    cdef uint64_t seen = 0          # the upper digits of the previous number, and their text
    cdef char digits[24]
    cdef int n, i, count = 0
    at = number(add_text(at, end, texts, r.head), end, r.id)
    if r.parent:
        at = number(add_text(at, end, b',"parent_id":', 13), end, r.parent)
    at = add_text(at, end, texts + r.head, r.rest)
    if r.timed:
        if r.more or r.reported:
            points = <Point*>malloc((PLAIN + 1 + 3 * r.more + r.reported) * sizeof(Point))
            if points == NULL:
                return NULL
        n = collect(r, more, points)
        if n:
            at = add_text(at, end, b',"timestamps":[', 15)
        for i in range(n):
            if end - at < POINT_BYTES:      # compared once for all that a point writes
                at = end
                break
            if points[i].name < NAMES:
                memcpy(at, HEADS[points[i].name], HEAD_BYTES)
                at += HEAD_SIZES[points[i].name]
            else:
                first = own[2 * (points[i].name - NAMES) + 1]
                last = own[2 * (points[i].name - NAMES) + 3] if points[i].name - NAMES + 1 < r.reported else r.names
                at = add_text(at, end, names + first, last - first)
                if end - at < POINT_BYTES:
                    at = end
                    break
            ns = <uint64_t>points[i].ns
            upper = ns // 100000000
            if upper:  # mostly the same as in the previous point
                if upper != seen:
                    seen = upper
                    count = <int>(number(digits, digits + sizeof(digits), upper) - digits)
                memcpy(at, digits, 16)
                lower = ns - upper * 100000000
                eight(at + count, <uint32_t>lower)
                at += count + 8
            else:
                at = number(at, end, ns)
            at = add_text(at, end, b"},", 2)
        if n and at < end:
            (at - 1)[0] = 93  # ]
        if points != plain:
            free(points)
    return add_char(at, end, 125)  # }


cdef inline void eight(char* at, uint32_t low) noexcept nogil:
    """Writes a number as eight digits, with leading zeros, into a place that has room for them."""
    cdef uint32_t high = low // 10000
    low -= high * 10000
    memcpy(at, &PAIRS[2 * (high // 100)], 2)
    memcpy(at + 2, &PAIRS[2 * (high % 100)], 2)
    memcpy(at + 4, &PAIRS[2 * (low // 100)], 2)
    memcpy(at + 6, &PAIRS[2 * (low % 100)], 2)


cdef inline char* number(char* at, char* end, uint64_t left) noexcept nogil:
    """Writes a number in decimal."""
    cdef char digits[24]
    cdef int i = 24
    while left >= 100000000:
        i -= 8
        eight(digits + i, <uint32_t>(left % 100000000))
        left //= 100000000
    while left >= 100:
        i -= 2
        memcpy(&digits[i], &PAIRS[2 * (left % 100)], 2)
        left //= 100
    if left >= 10:
        i -= 2
        memcpy(&digits[i], &PAIRS[2 * left], 2)
    else:
        i -= 1
        digits[i] = <char>(48 + left)
    return add_text(at, end, &digits[i], 24 - i)
