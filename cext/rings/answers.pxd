# How a model's process packs what it answers.
#   `refers`, a list, gets what an answer looks at in shared memory instead of copying it; the message holds it until RETURN.
from libc.stdint cimport uint32_t, uint64_t

from neptrio.rings.given cimport GivenMessage
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

cdef struct Sole:
    # how many references there are, here, to what belongs to an answer and to nobody else
    Py_ssize_t response
    Py_ssize_t tensors
    Py_ssize_t tensor
    Py_ssize_t array
    Py_ssize_t base

cdef class OutputBytes:
    cdef Segment segment
    cdef Block block

cdef class WireStrings:
    cdef readonly object memory  # in which `data` lies
    cdef const char* data
    cdef readonly size_t size
    cdef readonly tuple shape

cdef class AnswerPacker:
    cdef Segment segment
    cdef uint64_t outputs_first
    cdef list output_names
    cdef bint measuring
    cdef Sole most
    cdef int answers(self, MessageWriter writer, list answers, list refers, failed, GivenMessage given) except -1
    cdef int response(self, MessageWriter writer, response, names, bint sole, list refers, failed,
                      GivenMessage given) except -1
    cdef int tensor(self, MessageWriter writer, tensor, bint sole, list refers, GivenMessage given) except -1
    cdef int strings(self, MessageWriter writer, tensor, WireStrings source) except -1
    cdef int measure(self) except -1

cdef int pack_error(MessageWriter writer, str text, uint32_t code) except -1
