"""Receives the tensors of a large ModelInferRequest where the model will read them.

The problem: a gRPC message comes in pieces and is one buffer of bytes to whoever decodes it, so its tensors would be
copied again into memory that the model's process maps. The choice: clients write `raw_input_contents` last. When the
fields before it have come, they say which model is meant, and each tensor that follows is copied once, from the
receive buffer to its place, or has been received there (rule 4 of cext/transport/http2/stream).

Rules:
 1. Only a message with nothing but raw contents behind its first raw contents stays split. Any other is put together
    again, byte for byte, and decoded as if it had come so; that includes every malformed one.
 2. The model's process may change what lies in its memory, so a message that speaks of strings is never split: their
    structure must not change after it was checked.
 3. Memory is asked for before its bytes come, at most what the message has announced for one field. Without it, the
    field is received into memory of the server's own, and the message stays split.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

cdef extern from * nogil:
    """
    #include <string.h>
    #ifndef __USE_GNU
    void* memmem(const void*, size_t, const void*, size_t);
    #endif
    """
    void* memmem(const void* text, size_t n, const void* part, size_t length)

cdef enum:
    MOST_HEAD = 16384        # bytes before the raw contents; with more, the message is received in one piece
    MOST_RAWS = 256
    RAW_TAG = 58             # field 7, bytes with their length before them
    CUT = -1
    WRONG = -2


cdef int varint(const uint8_t* p, Py_ssize_t n, uint64_t* out) noexcept:
    """How many bytes a length has, CUT: not all of them are here, WRONG: more than any length has."""
    cdef int i
    cdef uint64_t value = 0
    for i in range(6):
        if i >= n:
            return CUT
        value |= <uint64_t>(p[i] & 0x7F) << 7 * i
        if p[i] < 0x80:
            out[0] = value
            return i + 1
    return WRONG


cdef SplitMessage split(const char* data, Py_ssize_t n, Py_ssize_t size, object source_of, bint* more):
    """See split_message.pxd. `source_of(name, version)` gives a function that takes memory for so many bytes, or None."""
    cdef SplitMessage made
    cdef const uint8_t* p = <const uint8_t*>data
    cdef Py_ssize_t at = 0, name_at = 0, name_n = 0, version_at = 0, version_n = 0
    cdef uint64_t length = 0
    cdef int field, got
    more[0] = False
    while True:
        if at >= n or at > MOST_HEAD:
            more[0] = at <= MOST_HEAD and n < size
            return None
        field = p[at] >> 3
        if p[at] & 0x87 != 2 or not 1 <= field <= 7:  # another kind of field, or a tag of several bytes
            return None
        got = varint(p + at + 1, n - at - 1, &length)
        if got < 0:
            more[0] = got == CUT and n < size
            return None
        if length > <uint64_t>(size - at - 1 - got):
            return None
        if field == 7:
            break
        at += 1 + got
        if field == 1:
            name_at, name_n = at, <Py_ssize_t>length
        elif field == 2:
            version_at, version_n = at, <Py_ssize_t>length
        at += <Py_ssize_t>length
    if length == 0 or memmem(p, at, b"BYTES", 5) != NULL:
        return None
    try:
        source = source_of(data[name_at:name_at + name_n].decode(), data[version_at:version_at + version_n].decode())
    except UnicodeDecodeError:
        return None
    if source is None:
        return None
    made = SplitMessage.__new__(SplitMessage)
    made.source = source
    made.size = size
    made.head = data[:at]
    made.have = at
    made.raws = []
    made.pieces = [made.head]
    return made


cdef class SplitMessage:
    """See the module's text. `len()` is that of the whole message."""

    def __len__(self):
        return self.size

    cdef int add(self, const char* data, Py_ssize_t n) except -1:
        """Takes the next bytes of the message, of which there must be so many."""
        cdef Py_ssize_t take
        cdef uint64_t length = 0
        cdef int got
        while n > 0:
            if self.whole is not None:
                memcpy(PyBytes_AS_STRING(self.whole) + self.have, data, n)
                self.have += n
                return 0
            if self.left == 0:
                self.tag[self.tag_size] = <unsigned char>data[0]
                self.tag_size += 1
                self.have += 1
                data += 1
                n -= 1
                got = CUT if self.tag[0] == RAW_TAG else WRONG
                if self.tag_size > 1 and got == CUT:
                    got = varint(&self.tag[1], self.tag_size - 1, &length)
                if got == WRONG or (got > 0 and length > <uint64_t>(self.size - self.have)) or (
                        len(self.raws) >= MOST_RAWS):
                    self.join()
                elif got > 0:
                    self.next_raw(length)
                continue
            take = self.left if self.left < n else n
            if self.at != data:  # it may have been received there
                memcpy(self.at, data, take)
            self.at += take
            self.left -= take
            self.have += take
            data += take
            n -= take
        return 0

    cdef int next_raw(self, uint64_t n) except -1:
        """Raw contents of `n` bytes follow."""
        cdef Py_buffer view
        cdef bytes own
        self.pieces.append((<char*>self.tag)[:self.tag_size])
        self.tag_size = 0
        memory = self.source(n) if n else b""
        if memory is None:
            own = PyBytes_FromStringAndSize(NULL, n)
            memory = own
            self.at = PyBytes_AS_STRING(own)
        elif n:
            PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE)
            self.at = <char*>view.buf  # it stays there for as long as the object lives
            PyBuffer_Release(&view)
            if <uint64_t>view.len < n:
                raise ValueError(f"{view.len} bytes of memory for {n}")
        self.left = n
        self.raws.append(memory)
        self.pieces.append(memory)
        return 0

    cdef int join(self) except -1:
        """Makes one piece of it, when all of its raw contents so far are whole; rule 1."""
        cdef bytes whole = PyBytes_FromStringAndSize(NULL, self.size)  # the rest is written as it comes
        cdef Py_buffer view
        cdef Py_ssize_t at = 0
        for piece in self.pieces:
            PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)
            memcpy(PyBytes_AS_STRING(whole) + at, view.buf, view.len)
            at += view.len
            PyBuffer_Release(&view)
        memcpy(PyBytes_AS_STRING(whole) + at, self.tag, self.tag_size)
        self.whole = whole
        self.pieces = self.raws = self.source = None
        return 0

    cdef object finish(self):
        """The message, all of whose bytes have come: this object, or its bytes where it is none that can be split."""
        self.source = None
        if self.whole is None and self.tag_size:
            self.join()
        return self if self.whole is None else self.whole
