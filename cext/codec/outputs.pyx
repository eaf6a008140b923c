"""Does with the outputs what the client asked for: returns only some, classifies, puts some into shared memory.

Every request passes through here. So a request without wishes costs one comparison, and for the most common wish (all
outputs, by name) pointers are compared.
"""
from neptrio.request.device_memory cimport copied_out, in_use
from neptrio.request.infer_request cimport GPU_MEMORY, InferRequest, InferResponse, RequestedOutput, Tensor

cdef enum:
    COPIED_BYTES = 1 << 20    # copying more takes over a quarter of a millisecond


def select(InferRequest request, InferResponse response, services):
    # type: (..., ..., WithSharedMemory) -> None
    """Keeps the requested outputs, in the order in which the backend made them, and classifies where asked.

    Outputs for shared memory are written there and stay in the response without data. Raises TritonError for a
    datatype that cannot be classified or a region that does not fit.
    """
    cdef RequestedOutput o
    cdef Tensor t
    cdef list kept
    cdef bint classify = False
    cdef bint shared = False
    if request.outputs is None or response.outputs is None:
        return
    kept = []
    for t in response.outputs:
        for o in request.outputs:
            if o.name is t.name or o.name == t.name:
                kept.append(t)
                if o.class_count:
                    classify = True
                if o.shm_region is not None:
                    shared = True
                break
    if classify:
        from neptrio.codec.classification import classified

        for i, t in enumerate(kept):
            for o in request.outputs:
                if o.name == t.name and o.class_count:
                    kept[i] = classified(request.model, t, o.class_count)
    if shared:
        for i, t in enumerate(kept):
            for o in request.outputs:
                if o.name == t.name and o.shm_region is not None:
                    kept[i] = services.shared_memory.write_output(
                        t, o.shm_place, o.shm_offset, o.shm_byte_size)
    response.outputs = kept


def selects_slowly(InferRequest request not None, InferResponse response not None):
    # type: (..., ...) -> bool
    """Whether select() takes so long that a worker must do it: it classifies a large output, or copies much into shared
    memory, or waits for a GPU to copy it. See docs/loop.md."""
    cdef RequestedOutput o
    cdef Tensor t
    cdef Py_ssize_t copied = 0
    for o in request.outputs:
        if o.shm_region is not None and response.outputs is not None:
            for t in response.outputs:
                if o.name == t.name:
                    if t.memory_kind != GPU_MEMORY:
                        copied += t.nbytes
                        if copied > COPIED_BYTES:
                            return True
                    if in_use() and copied_out(t, o.shm_place, o.shm_offset):
                        return True
        if o.class_count and response.outputs is not None:
            from neptrio.codec.classification import takes_long

            for t in response.outputs:
                if o.name == t.name and takes_long(t, o.class_count):
                    return True
    return False
