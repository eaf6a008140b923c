# Tensors in device memory, for those who do not know CUDA.
from neptrio._cext.request cimport Tensor

cpdef bint in_use() noexcept
cpdef Tensor on_host(Tensor tensor)
cpdef object fetch_inputs(list requests)
