# distutils: language = c++
"""The CUDA driver's errors.

Most errors concern one call: out of memory, a launch that asks for too much. Some leave the context unusable for all
later calls (as the driver's documentation of each says): an illegal address, a failed assertion, a launch that timed
out. Everything in that context is then lost. The backend takes every model on that GPU out of service, and the next
load begins with a new context.
"""
cimport cuda.bindings.cydriver as cu

from neptrio.errors import Internal, Reason


cdef bint sticky(int code) noexcept nogil:
    return code in (700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 214, 220, 226)


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
