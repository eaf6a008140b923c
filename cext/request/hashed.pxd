# A number of some bytes, by which caches of what was read before find their entries. Its low and its high bits are mixed.
from libc.stdint cimport uint64_t
from libc.string cimport memcpy


cdef inline uint64_t hash_of(const unsigned char* text, Py_ssize_t size) noexcept nogil:
    cdef uint64_t h = <uint64_t>size, word
    while size >= 8:
        memcpy(&word, text, 8)
        h = (h ^ word) * <uint64_t>0x9E3779B97F4A7C15
        h ^= h >> 32
        text += 8
        size -= 8
    if size:
        word = 0
        memcpy(&word, text, size)
        h = (h ^ word) * <uint64_t>0x9E3779B97F4A7C15
        h ^= h >> 32
    return h
