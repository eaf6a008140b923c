"""Mailboxes: carry work to an instance's thread, and completions back through one file descriptor.

The problem: an instance's thread must take a batch, run it and report it without the GIL if the model does not need it,
and the trio thread must hear of many completions in one wake-up. The choice: intrusive linked lists under a plain mutex
(held for a few pointer writes and a write to the eventfd, never during anything that can block), a condition variable to
wake the instance's thread, and an eventfd (a pipe where there is none) to wake trio.

Rules:
 1. A work item is in at most one list. One reference to it is held, by its mailbox and then by the completion queue;
    drain() passes that reference to its caller.
 2. The descriptor is written to only when the completion queue was empty, so one wake-up may stand for any number of
    completions. The reader first reads the descriptor and then drains the queue.
 3. A closed mailbox runs what it holds and accepts nothing more.
 4. Items of one mailbox are executed in the order of their submission; an item that replaces another gets its place.
 5. The descriptors are written to and closed with the lock held: a thread that was left behind may report when the server
    has ended, and the number could be that of another file of the program by then.
 6. What is posted is delivered, or told by lost() that it never will be: a thread may wait for what it brings.
"""
import os

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport close, read, write

cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <stdint.h>
    #include <time.h>
    #ifdef __APPLE__
    static int neptrio_cond_init(pthread_cond_t* cond) { return pthread_cond_init(cond, NULL); }
    static int neptrio_cond_wait_ns(pthread_cond_t* cond, pthread_mutex_t* lock, int64_t ns) {
        struct timespec t = {ns / 1000000000, ns % 1000000000};
        return pthread_cond_timedwait_relative_np(cond, lock, &t);
    }
    #else
    static int neptrio_cond_init(pthread_cond_t* cond) { /* by the clock that nobody sets */
        pthread_condattr_t attributes;
        int result = pthread_condattr_init(&attributes);
        if (result) return result;
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        result = pthread_cond_init(cond, &attributes);
        pthread_condattr_destroy(&attributes);
        return result;
    }
    static int neptrio_cond_wait_ns(pthread_cond_t* cond, pthread_mutex_t* lock, int64_t ns) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_sec += ns / 1000000000;
        t.tv_nsec += ns % 1000000000;
        if (t.tv_nsec >= 1000000000) { t.tv_sec++; t.tv_nsec -= 1000000000; }
        return pthread_cond_timedwait(cond, lock, &t);
    }
    #endif
    """
    int cond_init "neptrio_cond_init"(pthread_cond_t*) nogil
    int cond_wait_ns "neptrio_cond_wait_ns"(pthread_cond_t*, pthread_mutex_t*, int64_t) nogil


cdef void _run_python(Work* work) noexcept nogil:
    with gil:
        try:
            (<WorkItem>work.owner).execute()
        # execute() catches a model's errors, so this one is a bug: reported as unraisable
        except BaseException as error:
            import sys
            sys.unraisablehook(_Unraisable(error, (<WorkItem>work.owner)))


class _Unraisable:
    def __init__(self, error, item):
        self.exc_type = type(error)
        self.exc_value = error
        self.exc_traceback = error.__traceback__
        self.err_msg = "an instance thread's work item raised"
        self.object = item


cdef class WorkItem:
    """Something that is executed on an instance's thread and then delivered on the trio thread."""

    def __cinit__(self):
        self.work.run = _run_python
        self.work.owner = <void*>self
        self.work.next = NULL

    cpdef object execute(self):
        """Called on the instance's thread with the GIL, unless `work.run` was replaced."""

    cpdef object deliver(self):
        """Called on the trio thread after the item has come back."""

    def lost(self):
        """Called in place of deliver(), on any thread, when there is no trio thread any more. It does not raise."""

    cdef void run_here(self) noexcept:
        cdef Work* work = &self.work
        with nogil:
            work.run(work)


cdef class CompletionQueue:
    """Finished work items on their way back. trio waits for `read_fd` and then calls drain()."""

    def __cinit__(self):
        pthread_mutex_init(&self.lock, NULL)
        self.read_fd = self.write_fd = -1

    def __init__(self):
        if hasattr(os, "eventfd"):
            self.read_fd = self.write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.read_fd, self.write_fd = os.pipe()
            os.set_blocking(self.read_fd, False)
            os.set_blocking(self.write_fd, False)

    def __dealloc__(self):
        cdef Work* work = self.head
        while work != NULL:
            self.head = work.next
            Py_DECREF(<object>work.owner)
            work = self.head
        pthread_mutex_destroy(&self.lock)

    def close(self):
        """Closes the descriptors: nothing is delivered any more (rules 5 and 6)."""
        pthread_mutex_lock(&self.lock)
        if self.read_fd >= 0:
            close(self.read_fd)
            if self.write_fd != self.read_fd:
                close(self.write_fd)
        self.read_fd = self.write_fd = -1
        pthread_mutex_unlock(&self.lock)
        self.lose()

    def lose(self):
        """Tells the items that nobody will deliver."""
        for item in self.drain():
            item.lost()

    cdef void push(self, Work* work) noexcept nogil:
        cdef uint64_t one = 1
        cdef bint was_empty
        work.next = NULL
        pthread_mutex_lock(&self.lock)
        was_empty = self.head == NULL
        if was_empty:
            self.head = work
        else:
            self.tail.next = work
        self.tail = work
        self.pushed += 1
        if was_empty and write(self.write_fd, &one, sizeof(one)) < 0:
            pass  # the pipe is full, so the reader is already woken; or it is closed
        pthread_mutex_unlock(&self.lock)

    def post(self, WorkItem item not None):
        """Puts an item straight into the queue: its deliver() is called on the trio thread. Any thread."""
        Py_INCREF(item)
        cdef Work* work = &item.work
        with nogil:
            self.push(work)
        if self.read_fd < 0:  # looked at behind the push, as close() drains behind the change: one of them tells the item
            self.lose()

    def drain(self):
        # type: () -> list[WorkItem]
        """Removes and returns all items that have come back, oldest first."""
        cdef uint64_t[64] sink
        cdef Work* work
        cdef list items = []
        read(self.read_fd, sink, sizeof(sink))
        pthread_mutex_lock(&self.lock)
        work = self.head
        self.head = self.tail = NULL
        pthread_mutex_unlock(&self.lock)
        while work != NULL:
            item = <object>work.owner
            work = work.next
            Py_DECREF(item)
            items.append(item)
        self.drained += len(items)
        return items


cdef class Mailbox:
    """The work of one instance's thread. `waiting` counts items that were submitted and not yet begun."""

    def __cinit__(self, CompletionQueue completions not None):
        pthread_mutex_init(&self.lock, NULL)
        cond_init(&self.arrived)
        self.completions = completions

    def __dealloc__(self):
        cdef Work* work = self.head
        while work != NULL:
            self.head = work.next
            Py_DECREF(<object>work.owner)
            work = self.head
        pthread_cond_destroy(&self.arrived)
        pthread_mutex_destroy(&self.lock)

    def submit(self, WorkItem item not None):
        """Queues an item for the thread. Raises RuntimeError when the mailbox is closed."""
        if self.closed:
            raise RuntimeError("the mailbox is closed")
        Py_INCREF(item)
        cdef Work* work = &item.work
        work.next = NULL
        pthread_mutex_lock(&self.lock)
        if self.head == NULL:
            self.head = work
        else:
            self.tail.next = work
        self.tail = work
        self.waiting += 1
        pthread_cond_signal(&self.arrived)
        pthread_mutex_unlock(&self.lock)

    def replace(self, WorkItem item not None, WorkItem other=None):
        # type: (..., ...) -> bool
        """Replaces an item that has not begun by `other`, or removes it when `other` is None.

        Returns False, and changes nothing, when the item is not waiting here.
        """
        cdef Work* before = NULL
        cdef Work* work
        cdef Work* wanted = &item.work
        cdef Work* put = NULL
        if other is not None:
            put = &other.work
        pthread_mutex_lock(&self.lock)
        work = self.head
        while work != NULL and work != wanted:
            before = work
            work = work.next
        if work == NULL:
            pthread_mutex_unlock(&self.lock)
            return False
        if put != NULL:
            put.next = work.next
        else:
            put = work.next
            self.waiting -= 1
        if before == NULL:
            self.head = put
        else:
            before.next = put
        if self.tail == work:
            self.tail = before if other is None else put
        pthread_mutex_unlock(&self.lock)
        work.next = NULL
        if other is not None:
            Py_INCREF(other)
        Py_DECREF(item)
        return True

    cdef Work* take_ahead(self, void (*run)(Work*) noexcept nogil, int most) noexcept nogil:
        """Takes the next item if it is of the given kind, so that the running item can begin its work already.

        Called on the instance's thread by the item that runs. What was taken runs next, in this order, and can no
        longer be replaced. NULL when there is none, or when `most` were taken and have not run.
        """
        cdef Work* work = NULL
        cdef Work** end = &self.held
        if self.n_held >= most:
            return NULL
        pthread_mutex_lock(&self.lock)
        if self.head != NULL and self.head.run == run:
            work = self.head
            self.head = work.next
            self.waiting -= 1
        pthread_mutex_unlock(&self.lock)
        if work != NULL:
            work.next = NULL
            while end[0] != NULL:
                end = &end[0].next
            end[0] = work
            self.n_held += 1
        return work

    cdef void nap(self, int64_t nanoseconds) noexcept nogil:
        """Sleeps on the instance's thread, until an item arrives if none is waiting."""
        cdef Work* head
        pthread_mutex_lock(&self.lock)
        head = self.head
        while self.head == head and cond_wait_ns(&self.arrived, &self.lock, nanoseconds) == 0 and head != NULL:
            pass
        pthread_mutex_unlock(&self.lock)

    def close(self):
        """Accepts no more work; run() returns when the mailbox is empty."""
        pthread_mutex_lock(&self.lock)
        self.closed = True
        pthread_cond_broadcast(&self.arrived)
        pthread_mutex_unlock(&self.lock)

    def run(self):
        """Executes items until the mailbox is closed and empty: the body of an instance's thread."""
        cdef Work* work
        with nogil:
            while True:
                work = self.held
                if work != NULL:
                    self.held = work.next
                    self.n_held -= 1
                else:
                    pthread_mutex_lock(&self.lock)
                    while self.head == NULL and not self.closed:
                        pthread_cond_wait(&self.arrived, &self.lock)
                    work = self.head
                    if work == NULL:
                        pthread_mutex_unlock(&self.lock)
                        break
                    self.head = work.next
                    self.waiting -= 1
                    pthread_mutex_unlock(&self.lock)
                work.run(work)
                self.completions.push(work)
