# Access to tensors in device memory for code that does not use CUDA.
from neptrio.request.infer_request cimport Tensor

cpdef bint in_use() noexcept
cpdef bint copied_out(Tensor tensor, region, offset)
cpdef Tensor on_host(Tensor tensor)
cpdef bint any_on_device(list requests)
cpdef object fetch_inputs(list requests)
