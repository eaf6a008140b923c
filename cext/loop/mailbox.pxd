# Carries work to an instance's thread, and finished work back to the trio thread.
#   A WorkItem belongs to the mailbox from submit() until the completion queue returns it.
#   `run` is called on the instance's thread without the GIL.
from libc.stdint cimport int64_t, uint64_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)

cdef struct Work:
    void (*run)(Work*) noexcept nogil
    void* owner          # the WorkItem; one reference is held until it is back
    Work* next

cdef class WorkItem:
    cdef Work work
    cpdef object execute(self)   # on the instance thread, with the GIL
    cpdef object deliver(self)   # on the trio thread
    cdef void run_here(self) noexcept

cdef class CompletionQueue:
    cdef pthread_mutex_t lock
    cdef Work* head
    cdef Work* tail
    cdef readonly int read_fd
    cdef int write_fd
    cdef readonly uint64_t pushed
    cdef readonly uint64_t drained
    cdef void push(self, Work* work) noexcept nogil

cdef class Mailbox:
    cdef pthread_mutex_t lock
    cdef pthread_cond_t arrived
    cdef Work* head
    cdef Work* tail
    cdef Work* held                  # taken by take_ahead() for the item that runs; run after it, in this order
    cdef int n_held
    cdef bint closed
    cdef readonly int64_t waiting
    cdef Work* take_ahead(self, void (*run)(Work*) noexcept nogil, int most) noexcept nogil
    cdef void nap(self, int64_t nanoseconds) noexcept nogil
    cdef readonly CompletionQueue completions
