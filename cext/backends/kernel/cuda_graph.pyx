# distutils: language = c++
"""Graphs: a plan's clears and launches, recorded once and launched with a single call.

Worth it for plans with several launches that come again and again. A graph holds addresses, so it
belongs to a slot and to a generation of that slot's memory.

Rules:
 1. A slot keeps GRAPHS entries by plan number; another plan with the same place takes it over.
 2. An entry of an older generation is never launched: its addresses are gone.
 3. Batches that read or write memory of their own (a region, a state, a tensor between two steps) are
    launched kernel by kernel; their addresses differ every time.
 4. When recording fails, the batch fails with the driver's error and the next one tries again.
"""
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu


cdef Graph* graph_of(Slot* s, Plan* plan) noexcept nogil:
    """The slot's entry for a plan; another plan's entry is given up for it."""
    cdef Graph* graph = &s.graphs[plan.id % GRAPHS]
    if graph.plan != plan.id or graph.generation != s.generation:
        if graph.executable != NULL:
            cu.cuGraphExecDestroy(graph.executable)
        memset(graph, 0, sizeof(Graph))
        graph.plan = plan.id
        graph.generation = s.generation
    return graph


cdef int end_recording(cu.CUstream stream, Graph* graph, int result) noexcept nogil:
    """Ends what cuStreamBeginCapture began; `result` is of the launches in between. Returns a CUresult."""
    cdef cu.CUgraph made = NULL
    cdef int ended = cu.cuStreamEndCapture(stream, &made)
    if result == 0:
        result = ended
    if result == 0:
        result = cu.cuGraphInstantiate(&graph.executable, made, 0)
    if made != NULL:
        cu.cuGraphDestroy(made)
    if result:
        graph.executable = NULL
    return result
