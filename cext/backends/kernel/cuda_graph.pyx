# distutils: language = c++
"""Graphs: a plan's clears and launches, recorded once and launched with a single call.

They are worth recording for plans with several launches that are used again and again. A graph contains addresses, so
it belongs to a slot (cuda_queue), and to a generation of that slot's memory.

Rules:
 1. A slot has GRAPHS entries, found by plan number; a plan may replace another plan's entry.
 2. An entry of an older generation is never launched, because the memory at its addresses was freed.
 3. Batches that use memory which only they have (a region, a state, a tensor between two steps) are launched kernel
    by kernel: their addresses differ every time.
 4. When recording fails, the batch is launched kernel by kernel. Others can end a recording: the driver does so when a
    library of the process waits for the whole device meanwhile. It is tried anew after some uses, FAILURES times.
"""
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_memory cimport judged

cdef enum:
    FAILURES = 3
    NEVER = -(1 << 30)


cdef Graph* graph_of(Slot* s, Plan* plan) noexcept nogil:
    """The slot's entry for a plan; replaces the entry of another plan."""
    cdef Graph* graph = &s.graphs[plan.id % GRAPHS]
    if graph.plan != plan.id or graph.generation != s.generation:
        if graph.executable != NULL:
            cu.cuGraphExecDestroy(graph.executable)
        memset(graph, 0, sizeof(Graph))
        graph.plan = plan.id
        graph.generation = s.generation
    return graph


cdef int end_recording(cu.CUstream stream, Graph* graph, int result) noexcept nogil:
    """Ends the recording that cuStreamBeginCapture began; `result` is that of the launches. Returns a CUresult."""
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


cdef int not_recorded(Queue* q, Graph* graph, int result) noexcept nogil:
    """After a recording that failed with `result`: 0, and the run does without (rule 4), or the error that ended the
    context."""
    judged(q.memory, result)
    if q.memory.broken:
        return q.memory.broken
    graph.failures += 1
    graph.uses = 0 if graph.failures < FAILURES else NEVER
    return 0
