"""What one process says to another on one ring: its descriptors in order, and the memory of its messages.

The problem: a message must stay where it is for as long as the other process looks at it, and no word of that process
may decide which of our memory is free, but for one that says so of a message that we did lend. The choice: one discipline
in every direction, between the server and a model's process as between the engine and a front end.

Rules:
 1. A message of up to KEEP_ABOVE bytes is copied whole by who takes its descriptor: its memory is free as soon as the ring has
    passed that. A longer one, and one in a segment of its own, is lent: looked at where it lies, until RETURN.
 2. A message that names memory beside its own is lent, and so counts as longer than KEEP_ABOVE; until RETURN its sender holds
    what it names.
 3. The accounts are this process's own. Of the other side one number is read, how far it is in the ring, and compared with
    what it may be.
 4. A RETURN is never lost and never blocks who sends it, a finalizer on any thread: what finds the ring full waits in
    `returns`, and passes by what waits for memory, which the other side may wait to be given by this very return.
 5. push() and reserve() are one step each for all threads of a process: they hold the GIL and run no Python code.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from neptrio.rings.body_area cimport BodyArea, BodyMemory
from neptrio.rings.kinds cimport KEEP_ABOVE, RETURN
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Entry, Segment, ring_head, ring_push

from collections import deque

cdef enum:
    REAP_ABOVE = 32          # messages that the other side may have taken before their memory is looked after


@cython.final
cdef class Queued:
    """See line.pxd."""


@cython.no_gc
cdef class Lease:
    """The right to look at a message of the other side where it lies. It is returned with the last reference."""

    def __dealloc__(self):
        if self.line is not None:
            self.line.give_back(self.offset)


@cython.final
cdef class Line:
    """See the module's text. `at`: where in the area's segment the ring lies."""

    def __init__(self, BodyArea area not None, dict lent not None, uint64_t at, uint64_t entries, late, late_return):
        self.area = area
        self.lent = lent
        self.ring.base = area.segment.base + at
        self.ring.entries = entries
        self.small_room = 2 * entries
        self.small = <Small*>malloc(self.small_room * sizeof(Small))
        if self.small == NULL:
            raise MemoryError
        self.waiting = deque()
        self.returns = deque()
        self.late = late
        self.late_return = late_return

    def __dealloc__(self):
        free(self.small)

    cdef object reserve(self, Entry* entry, list named):
        """Takes memory for a message of `entry.length` bytes and sets its offset: what holds it if it is lent, True if it is
        not, None when there is no room now. `named`: what it names elsewhere (rule 2)."""
        cdef BodyMemory memory
        cdef int64_t offset
        if named is not None and entry.length <= KEEP_ABOVE:
            entry.length = KEEP_ABOVE + 1
        if entry.length <= KEEP_ABOVE:
            if self.small_count >= REAP_ABOVE:
                self.reap()
            offset = self.area.slab.take(entry.length)
            if offset < 0 and self.small_count:
                self.reap()
                offset = self.area.slab.take(entry.length)
            if offset < 0:
                return None
            entry.offset = <uint64_t>offset
            return True
        if self.small_count:
            self.reap()
        memory = self.area.take(entry.length)
        if memory is not None:
            entry.offset = memory.block.offset
            self.lent[entry.offset] = memory if named is None else (memory, named)
        return memory

    cdef int push(self, const Entry* entry) except -2:
        """1, or 0 when the ring is full, -1 when the other side's index cannot be."""
        cdef Small* kept
        cdef int done
        if self.small_count == self.small_room and not self.reap():
            return -1  # else it makes room: the ring has fewer entries
        done = ring_push(&self.ring, entry)
        if done > 0:
            self.sent += 1
            if entry.size and not is_lent(entry):
                kept = &self.small[(self.small_first + self.small_count) % self.small_room]
                kept.behind, kept.offset, kept.size = self.ring.own, entry.offset, entry.length
                self.small_count += 1
        return done

    cdef int give_back(self, uint64_t offset) except -1:
        """Tells the other side that nobody looks at a message of its any more. Wakes nobody."""
        cdef Entry entry
        if self.closed:
            return 0
        entry.kind, entry.size, entry.id, entry.offset, entry.length = RETURN, 0, 0, offset, 0
        if self.push(&entry) <= 0:
            self.returns.append(offset)
            if self.late_return is not None:
                self.late_return()
        return 0

    cdef int push_returns(self) except -2:
        """Pushes the returns that wait: 1 when none is left, or 0 and -1 as push()."""
        cdef Entry entry
        cdef int done = 1
        while self.returns:
            offset = self.returns.popleft()  # other threads do this, too
            entry.kind, entry.size, entry.id, entry.offset, entry.length = RETURN, 0, 0, offset, 0
            done = self.push(&entry)
            if done <= 0:
                self.returns.appendleft(offset)
                break
        return done

    cdef int wait(self, const Entry* entry, MessageWriter writer, list named) except -1:
        """Puts a descriptor in line."""
        cdef Queued queued = Queued.__new__(Queued)
        queued.entry = entry[0]
        queued.writer = writer
        queued.named = named
        self.waiting.append(queued)
        return 0

    cdef bint reap(self) except -1:
        """Frees the memory of small messages whose descriptors the other side has taken, and so copied. False when its index
        cannot be."""
        cdef uint64_t waiting = self.ring.own - ring_head(&self.ring)
        cdef Small* oldest
        if waiting > self.ring.entries:
            return False
        while self.small_count:
            oldest = &self.small[self.small_first]
            if self.ring.own - oldest.behind < waiting:
                break
            self.small_first = (self.small_first + 1) % self.small_room
            self.small_count -= 1
            self.area.give(oldest.offset, oldest.size)
        return True

    cdef int close(self) except -1:
        """Nothing more is sent. The area stays for as long as somebody looks at it."""
        cdef Small* kept
        cdef Queued queued
        self.closed = True
        self.lent.clear()
        while self.small_count:
            self.small_count -= 1
            kept = &self.small[(self.small_first + self.small_count) % self.small_room]
            self.area.give(kept.offset, kept.size)
        for queued in self.waiting:
            if queued.writer is None and queued.entry.size and not is_lent(&queued.entry):
                self.area.give(queued.entry.offset, queued.entry.length)  # has its memory, but no place in the ring
        self.waiting.clear()
        self.returns.clear()
        self.late = self.late_return = None
        return 0
