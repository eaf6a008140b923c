"""The queues of a dynamic batcher, and the decision which of their requests form the next batch.

The problem: requests wait by priority, each level with its own limit and deadlines. A batch is a prefix of that order.
Any request may leave at any moment (cancelled, timed out), and every request passes through here. The choice: one
intrusive doubly linked list per level (and a second one for requests that a DELAY timeout has sent to the back), one
indexed binary heap for all deadlines, and a decision that changes nothing: decide() only sets its result, take()
removes exactly the requests that the last decide() chose.

Rules:
 1. The order is: level 1 in order of arrival, level 1's late requests, level 2, and so on. A batch is a prefix of
    it. Within a level nothing is overtaken except by a DELAY timeout.
 2. Requests are never split: a batch grows while the next request still fits into max_batch_size.
 3. Requests of a batch have the same inputs, with equal shapes beyond the batch dimension (except ragged inputs)
    and equal values of shape tensors.
 4. The largest prefix whose size is a preferred size is sent at once, unless the oldest request's delay is over: then
    everything that fits is sent. A batch that can no longer reach a preferred size does not wait either. Without
    a delay, whatever is there is sent.
 5. A level holds at most max_size requests, late ones included; push() returns False when it is full.
 6. expire() is exact: afterwards no request with a deadline at or before `now` can be chosen.

Source: docs/protocol/rules.md E2, docs/protocol/observed.md 9. Time is an argument, in nanoseconds of
CLOCK_MONOTONIC.
"""
cimport cython
from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from neptrio.request.infer_request cimport (
    QUEUE_START,
    QUEUED,
    TAKEN,
    InferRequest,
    InputSpec,
    Tensor,
    now_ns,
)

cdef str FULL = "full"
cdef str PREFERRED = "preferred"
cdef str DELAY = "delay"
cdef str SHAPE = "shape"
cdef str IDLE = "idle"
cdef str FLUSH = "flush"
cdef str WAIT = "wait"

REASONS = (FULL, PREFERRED, DELAY, SHAPE, IDLE, FLUSH)  # type: tuple[str, ...]


from bisect import insort


@cython.freelist(256)
@cython.trashcan(True)
cdef class Entry:
    """A waiting request's place in its level."""


cdef class Level:
    """One priority level: its two lists and its queue policy."""

    def __init__(self, int64_t number, int64_t max_size, uint64_t timeout_us, bint override, bint delay):
        self.number = number
        self.max_size = max_size
        # a timeout of more nanoseconds than 63 bits hold (292 years) counts as none
        self.timeout_ns = <int64_t>timeout_us * 1000 if timeout_us <= 4611686018427387 else 0
        self.override = override
        self.delay = delay


def _number(Level level):
    return level.number


cdef class BatchQueue:
    """Waiting requests of one model. `policies` is a list of (max_queue_size, timeout_us,
    allow_timeout_override, delay) per level, the first being priority 1; models without priority
    levels have one.
    """

    def __init__(self, int64_t max_batch_size, preferred, int64_t delay_ns, list policies,
                 int64_t default_level=1, input_specs=(), shape_tensors=()):
        # type: (..., Iterable[int], ..., ..., ..., Iterable[InputSpec], Iterable[str]) -> None
        cdef InputSpec spec
        self.max_batch_size = max_batch_size if max_batch_size > 1 else 1
        self.preferred = set(preferred) or {self.max_batch_size}
        self.max_preferred = max(self.preferred)
        self.delay_ns = delay_ns
        self.default_level = default_level
        self.levels = [Level(i + 1, *policy) for i, policy in enumerate(policies)]
        self.busy = self.levels if len(self.levels) == 1 else []
        self.bounded = all(level.max_size for level in self.levels)
        self.heap = []
        self.varying = []
        self.shape_tensors = set(shape_tensors)
        if self.max_batch_size > 1:
            for spec in input_specs:
                if spec.optional or (spec.fixed_elements < 0 and not spec.ragged) or spec.name in self.shape_tensors:
                    self.varying.append(spec)
        self.reason = WAIT

    # ---------------------------------------------------------------- lists and heap

    cdef void link(self, Entry e, bint late):
        cdef Level level = e.level
        e.delayed = late
        e.next = None
        if late:
            e.prev = level.late_tail
            if level.late_tail is None:
                level.late_head = e
            else:
                level.late_tail.next = e
            level.late_tail = e
        else:
            e.prev = level.tail
            if level.tail is None:
                level.head = e
            else:
                level.tail.next = e
            level.tail = e

    cdef void unlink(self, Entry e):
        cdef Level level = e.level
        if e.prev is not None:
            e.prev.next = e.next
        elif e.delayed:
            level.late_head = e.next
        else:
            level.head = e.next
        if e.next is not None:
            e.next.prev = e.prev
        elif e.delayed:
            level.late_tail = e.prev
        else:
            level.tail = e.prev
        e.prev = None
        e.next = None

    cdef bint sooner(self, Entry a, Entry b):
        cdef int64_t x = a.request.deadline_ns, y = b.request.deadline_ns
        return x < y or (x == y and a.order < b.order)

    cdef void sift(self, Py_ssize_t at):
        """Restores the heap's order around the entry at `at`, whose deadline may be too early or too late for its place."""
        cdef list heap = self.heap
        cdef Py_ssize_t n = len(heap), up, down
        cdef Entry e = heap[at], other
        while at > 0:
            up = (at - 1) >> 1
            other = heap[up]
            if not self.sooner(e, other):
                break
            heap[at] = other
            other.at = at
            at = up
        while True:
            down = 2 * at + 1
            if down >= n:
                break
            if down + 1 < n and self.sooner(<Entry>heap[down + 1], <Entry>heap[down]):
                down += 1
            other = heap[down]
            if not self.sooner(other, e):
                break
            heap[at] = other
            other.at = at
            at = down
        heap[at] = e
        e.at = at

    cdef void heap_add(self, Entry e):
        self.heap.append(e)
        self.sift(len(self.heap) - 1)

    cdef void heap_remove(self, Entry e):
        cdef Py_ssize_t at = e.at
        cdef Entry last
        if at < 0:
            return
        e.at = -1
        last = self.heap.pop()
        if last is not e:
            self.heap[at] = last
            self.sift(at)

    # ---------------------------------------------------------------- coming and going

    cdef Level level_of(self, InferRequest request):
        """The level of a priority; 0 and priorities beyond the last level mean the default level."""
        cdef uint64_t n = len(self.levels), p = request.priority
        if n == 1:
            return self.levels[0]
        return self.levels[(p if 0 < p <= n else <uint64_t>self.default_level) - 1]

    cdef int64_t due(self, Level level, InferRequest request):
        """The deadline of a request that waits since its QUEUE_START, 0 when it has none."""
        cdef int64_t timeout = level.timeout_ns
        if not timeout:
            return 0
        if level.override and 0 < request.timeout_us < <uint64_t>timeout // 1000:
            timeout = <int64_t>request.timeout_us * 1000
        return request.timestamps[<int>QUEUE_START] + timeout

    def refused_at(self, InferRequest request) -> int:
        """When a request that waits since its QUEUE_START is to be refused, here or elsewhere; 0: never."""
        cdef Level level = self.level_of(request)
        return 0 if level.delay else self.due(level, request)

    cdef object signature(self, InferRequest request):
        cdef InputSpec spec
        cdef Tensor t, found
        cdef list parts
        if not self.varying:
            return None
        parts = []
        for spec in self.varying:
            found = None
            for t in request.inputs:
                if t.name == spec.name:
                    found = t
                    break
            if found is None:
                parts.append(None)
            elif spec.ragged:
                parts.append(True)
            elif spec.name in self.shape_tensors:
                parts.append((found.shape[1:], found.tobytes()))
            else:
                parts.append(found.shape[1:])
        return parts

    cpdef bint push(self, InferRequest request) except -1:
        """Appends a request, sets its timestamp QUEUE_START and its deadline. Returns False when its level is full."""
        cdef Level level = self.level_of(request)
        cdef Entry e
        if not request.timestamps[<int>QUEUE_START]:
            request.timestamps[<int>QUEUE_START] = now_ns()
        if level.max_size and level.size >= level.max_size:
            return False
        e = Entry.__new__(Entry)
        e.request = request
        e.level = level
        e.at = -1
        self.arrivals += 1
        e.order = self.arrivals
        e.signature = self.signature(request)
        request.state = QUEUED
        request.scheduler_data = e
        request.deadline_ns = self.due(level, request)
        self.link(e, False)
        if level.size == 0 and self.busy is not self.levels:
            insort(self.busy, level, key=_number)
        level.size += 1
        self.size += 1
        self.weight += request.batch_size
        if request.deadline_ns:
            self.heap_add(e)
        return True

    cpdef bint remove(self, InferRequest request) except -1:
        """Removes a waiting request. Returns False when it does not wait here."""
        if request.state != QUEUED or not isinstance(request.scheduler_data, Entry):
            return False
        cdef Entry e = request.scheduler_data
        self.heap_remove(e)
        self.unlink(e)
        e.level.size -= 1
        if e.level.size == 0 and self.busy is not self.levels:
            self.busy.remove(e.level)
        self.size -= 1
        self.weight -= request.batch_size
        request.scheduler_data = None
        return True

    @property
    def full(self) -> bool:
        """True when every level holds as many requests as it may."""
        cdef Level level
        if not self.bounded:
            return False
        for level in self.levels:
            if level.size < level.max_size:
                return False
        return True

    @property
    def next_deadline_ns(self) -> int:
        """The earliest deadline of a waiting request, 0 when there is none."""
        return (<Entry>self.heap[0]).request.deadline_ns if self.heap else 0

    def expire(self, int64_t now) -> list:
        # type: (...) -> list[InferRequest]
        """Applies all timeouts that are due. Requests with action DELAY move to the back of their level; those with
        REJECT are removed and returned, earliest deadline first."""
        cdef list rejected = []
        cdef Entry e
        while self.heap:
            e = self.heap[0]
            if e.request.deadline_ns > now:
                break
            if e.level.delay:
                self.heap_remove(e)
                self.unlink(e)
                self.link(e, True)
            else:
                request = e.request
                self.remove(e.request)
                rejected.append(request)
        return rejected

    # ---------------------------------------------------------------- deciding

    cpdef int64_t decide(self, int64_t now, bint flush=False) except -1:
        """Decides how many requests, from the front, form the next batch; 0: wait until `wake_ns`.

        Sets `reason` to the reason why, `saturated` to whether waiting could not improve the batch, and `oldest_wait_ns`
        to how long its oldest request has waited. With `flush` the delay is not waited for.
        """
        cdef Level level
        cdef Entry e, first = None
        cdef int64_t n = 0, total = 0, best = 0, best_total = 0, best_oldest = 0, size, oldest = INT64_MAX
        cdef bint late, over, passed = False
        cdef str closed = None
        self.count = 0
        self.saturated = False
        self.reason = WAIT
        self.wake_ns = 0
        self.oldest_wait_ns = 0
        if self.size == 0:
            return 0
        for level in self.busy:
            late = False
            e = level.head
            while closed is None:
                if e is None:
                    if late:
                        break
                    late = True
                    e = level.late_head
                    continue
                size = e.request.batch_size
                if n:
                    if best == 0 and total + size > self.max_preferred:
                        best, best_total, best_oldest = n, total, oldest
                        passed = True
                    if total + size > self.max_batch_size:
                        closed = FULL
                        break
                    if first.signature != e.signature:
                        closed = SHAPE
                        break
                else:
                    first = e
                n += 1
                total += size
                if e.request.timestamps[<int>QUEUE_START] < oldest:
                    oldest = e.request.timestamps[<int>QUEUE_START]
                if total in self.preferred:
                    best, best_total, best_oldest = n, total, oldest
                if total >= self.max_batch_size:
                    closed = FULL
                e = e.next
            if closed is not None:
                break
        over = self.delay_ns > 0 and now - oldest >= self.delay_ns
        if best and not over:
            self.count = best
            if best_total >= self.max_batch_size:
                self.reason = FULL
            elif best == n and closed is not None and best_total not in self.preferred:
                self.reason = closed
            else:
                self.reason = PREFERRED
            self.saturated = passed or closed is not None or best_total >= self.max_preferred
            self.oldest_wait_ns = now - best_oldest
            return best
        if closed is not None:
            self.reason = closed
            self.saturated = True
        elif over:
            self.reason = DELAY
        elif total >= self.max_preferred:
            self.reason = PREFERRED
            self.saturated = True
        elif self.delay_ns == 0:
            self.reason = IDLE
        elif flush:
            self.reason = FLUSH
        else:
            self.wake_ns = oldest + self.delay_ns
            return 0
        self.count = n
        self.oldest_wait_ns = now - oldest
        return n

    cpdef list take(self):
        # type: () -> list[InferRequest]
        """Removes and returns the requests that the last decide() chose. No request may have come or gone since."""
        cdef list taken = []
        cdef Level level
        cdef Entry e
        cdef InferRequest request
        for level in list(self.busy):  # which loses those that become empty
            while len(taken) < self.count:
                e = level.head if level.head is not None else level.late_head
                if e is None:
                    break
                request = e.request
                self.remove(request)
                request.state = TAKEN
                taken.append(request)
        self.count = 0
        return taken

    def requests(self) -> list:
        # type: () -> list[InferRequest]
        """Every waiting request, in the order in which they would be taken."""
        cdef Level level
        cdef Entry e
        cdef list found = []
        for level in self.busy:
            for e in (level.head, level.late_head):
                while e is not None:
                    found.append(e.request)
                    e = e.next
        return found

    def size_of(self, int64_t level) -> int:
        """The number of waiting requests of one level, from 0."""
        cdef Level found = self.levels[level]
        return found.size

    def sizes(self) -> list:
        # type: () -> list[int]
        """The number of waiting requests of each level."""
        cdef Level level
        return [level.size for level in self.levels]
