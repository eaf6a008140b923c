# distutils: language = c++
"""The CUDA driver's errors.

Most errors concern one call: out of memory, a launch that asks for too much. Some leave the context unusable for all
later calls (as the driver's documentation of each says): an illegal address, a failed assertion, a launch that timed
out. Everything in that context is then lost, for as long as the process lives: CUDA promises that only a new process
can use the device again, and a reset would take the primary context from the other libraries that share it (torch,
ONNX Runtime). So the backend takes every model on that GPU out of service and makes no more calls there.

Two errors are doubtful: "device unavailable" and "unknown" may pass, but not twice in a row.
"""
cimport cuda.bindings.cydriver as cu

from neptrio.errors import Internal, Reason


cdef bint sticky(int code) noexcept nogil:
    return code in (700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 214, 220, 226)


cdef bint doubtful(int code) noexcept nogil:
    return code in (46, 999)


def error_name(int code) -> str:
    """The driver's name of an error code, such as CUDA_ERROR_ILLEGAL_ADDRESS."""
    cdef const char* name = NULL
    try:
        if cu.cuGetErrorName(<cu.CUresult>code, &name) == 0 and name != NULL:
            return name.decode()
    except Exception:  # there is no driver
        pass
    return f"CUDA error {code}"


cdef object check(int code, str doing):
    """Raises Internal with the error's name."""
    if code:
        raise Internal(f"{error_name(code)} while {doing}", reason=Reason.BACKEND)
