# Executes batches on a GPU, up to SLOTS runs at a time: launches those ahead, waits for each in turn.
from neptrio.backends.kernel.cuda_launch cimport DeviceWork
from neptrio.loop.mailbox cimport Work

cdef void run_device(Work* work) noexcept nogil
cdef void work_off(DeviceWork* w, bint ahead) noexcept nogil
