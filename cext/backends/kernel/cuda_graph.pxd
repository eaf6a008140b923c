# Graphs: the kernels of a plan, recorded once and launched as a whole.
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_queue cimport GRAPHS, Graph, Queue, Slot
from neptrio.backends.kernel.plan cimport Plan

cdef Graph* graph_of(Slot* s, Plan* plan) noexcept nogil
cdef int end_recording(cu.CUstream stream, Graph* graph, int result) noexcept nogil
cdef int not_recorded(Queue* q, Graph* graph, int result) noexcept nogil
