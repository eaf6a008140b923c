"""The duplex channel to another process, as the server has one to each model's process and to each front end, and a front
end to the server.

The problem: requests and answers must cross a process border for a few microseconds, whatever the other process does to
the memory. The choice: rings of descriptors and an area on each side in which it alone keeps the accounts (cext/rings/line).
Both directions are alike, so one class serves all ends; its subclasses know what messages mean.

Rules:
 1. Everything runs with the GIL, on the trio thread of its process. The one exception is the last reference to a Lease,
    which may go on any thread.
 2. What the other side wrote is believed in nothing: a descriptor is copied before it is looked at, a message's own
    part before it is read; lengths, offsets, counts, datatypes and shapes are compared with what they may be. What
    cannot be is a Violation, and the other side is given up.
 3. A small message is copied whole before its descriptor is passed, so nobody can change it. The tensors of one that is lent
    are looked at where they lie, so their elements may change under the reader's eyes. Elements of numbers may; strings,
    which have a structure, and what lies badly are always copied.
 4. Nothing is given up for want of room: what does not fit into its ring waits in that ring's own line, in order, and
    look() is called again. What waits for one ring never waits for another: the other side may take nothing of the one
    until it has heard something on the other.
 5. The other side is woken only where it sleeps. A RETURN wakes nobody: it is taken with what comes next. But a ring that is
    full wakes its consumer, whatever lies in it.
 6. A Violation does not leave this object at the server: give_up() is where each ends, whichever call finds it, and from then
    on nothing is sent or taken. So no caller, a scheduler or a timer among them, has to expect one.
 7. Each time that a side says that it sleeps, it is woken for that once at most, even where it finds something at once and
    stays awake. So `sleeps` bounds how many wakes it may not have read; drain() adds no more than SLEEPS_AT_ONCE to it.
 8. To take a descriptor is to copy it, to open its message, to pass it, and to act on it, in this order. What acting on it
    raises costs what the message was about, and not those behind it.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.request.infer_request cimport DT_BYTES, Tensor, now_ns
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.kinds cimport OWN, RETURN
from neptrio.rings.line cimport Lease, Line, Queued, is_lent
from neptrio.rings.message cimport MessageReader
from neptrio.rings.ring cimport (
    Entry,
    Segment,
    ring_advance,
    ring_must_wake,
    ring_peek,
    ring_sleep,
    ring_spin,
    ring_stay,
)

import logging

from neptrio.foreign import type_name
from neptrio.rings.message import Violation

cdef enum:
    AT_ONCE = 512            # descriptors taken before other events have their turn
    CLOCK_AFTER = 4          # descriptors between two looks at the clock
    SLEEPS_AT_ONCE = 16      # attempts to sleep that something came into, before other events have theirs

log = logging.getLogger("neptrio.rings")


cdef class Channel(MessageReader):
    """See the module's text. `into`: where the ring lies that is taken from; `other`: the other side's area."""

    def __init__(self, Segment segment not None, uint64_t into, uint64_t into_entries, uint64_t area, uint64_t other,
                 uint64_t size):
        self.segment = segment
        self.into.base = segment.base + into
        self.into.entries = into_entries
        self.area = BodyArea(segment, area, size)
        self.other = other
        self.other_end = other + size
        self.lent = {}
        self.lines = []
        self.sleeps = 1
        ring_sleep(&self.into)   # the first push wakes this side

    cdef Line line(self, uint64_t at, uint64_t entries, late, late_return):
        """A line of this side."""
        made = Line(self.area, self.lent, at, entries, late, late_return)
        self.lines.append(made)
        return made

    cdef int give_up(self, str why) except -1:
        """The other side has written what cannot be (rule 6)."""
        if not (self.given_up or self.closed):
            self.given_up = True
            self.violated(why)
        return 0

    def violated(self, why):
        # type: (str) -> None
        """Called once, when the other side has written what cannot be."""
        raise Violation(why)

    # ------------------------------------------------------------ out

    cdef int push(self, Line line, const Entry* entry) except -1:
        """Pushes in order, or puts it in line."""
        if self.closed or self.given_up:
            return 0
        if line.waiting:
            line.wait(entry, None, None)
        elif not self.try_push(line, entry):
            line.wait(entry, None, None)
            line.late()
        return 0

    cdef bint try_push(self, Line line, const Entry* entry) except -1:
        """False when the ring is full, or the other side was given up. Wakes it by rule 5."""
        cdef int done = line.push(entry)
        if done < 0:
            self.give_up("its index of a ring cannot be")
            return False
        if done:
            self.pushed(line, entry)
        if (done == 0 or entry.kind != RETURN) and ring_must_wake(&line.ring):
            self.wakes += 1
            self.wake(line)
        return done

    cdef int post(self, Line line, uint32_t kind, uint64_t id, uint64_t length) except -1:
        """Sends a descriptor without a message."""
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, 0, length
        return self.push(line, &entry)

    cdef bint flush(self, Line line) except -1:
        """Pushes what waits in line, as far as there is room; True when something waits still."""
        cdef Queued queued
        cdef int done = line.push_returns()
        if done < 0:
            self.give_up("its index of a ring cannot be")
        while line.waiting and not (self.closed or self.given_up):
            queued = line.waiting[0]
            if queued.writer is not None and not self.placed(line, queued):
                return True
            if not self.try_push(line, &queued.entry):
                return True
            line.waiting.popleft()
        if not done and ring_must_wake(&line.ring):
            self.wakes += 1
            self.wake(line)
        return not done

    def look(self) -> bool:
        """Sends what waits for room, as far as there is some; True when something waits still, and it is to be called again."""
        cdef Line line
        cdef bint more = False
        for line in self.lines:
            if not (self.closed or self.given_up):
                if self.flush(line):
                    more = True
                if line.small_count and not line.reap():
                    self.give_up("its index of a ring cannot be")
        return more and not (self.closed or self.given_up)

    @property
    def waiting(self) -> int:
        """Descriptors that wait in line."""
        cdef Line line
        cdef Py_ssize_t found = 0
        for line in self.lines:
            found += len(line.waiting)
        return found

    cdef int pushed(self, Line line, const Entry* entry) except -1:
        """A descriptor lies in its ring."""
        return 0

    cdef bint placed(self, Line line, Queued queued) except -1:
        """Whether the bytes of a message in line lie where its descriptor says."""
        return True

    cdef int wake(self, Line line) except -1:
        """Wakes the other side, which sleeps."""
        raise NotImplementedError

    # ------------------------------------------------------------ in

    def comes(self, int64_t spin_ns) -> bool:
        """Whether there is something for drain(), or comes within `spin_ns`; nobody wakes for that. When nothing has come,
        the other side wakes again as if one slept. Without the GIL."""
        cdef bint came
        with nogil:
            ring_stay(&self.into)
            came = ring_spin(&self.into, spin_ns)
            if not came:
                self.sleeps += 1
                came = not ring_sleep(&self.into)
        return came

    def drain(self, int at_once=AT_ONCE) -> bool:
        """Takes up to `at_once` messages that the other side has pushed; True when there are more, and it is to be called
        again."""
        try:
            return self.taken(at_once)
        except Violation as error:
            self.give_up(str(error))
            return False

    cdef bint taken(self, int at_once) except -1:
        cdef Entry entry
        cdef Line line
        cdef int got, count = 0, slept = 0
        cdef int64_t until = 0
        while not (self.closed or self.given_up):
            got = ring_peek(&self.into, &entry)
            if got < 0:
                raise Violation("its index of a ring cannot be")
            if got == 0:
                if slept == SLEEPS_AT_ONCE:
                    return True
                slept += 1
                self.sleeps += 1
                if ring_sleep(&self.into):
                    break
                continue
            if count >= at_once:
                return True
            if self.turn_ns and count % CLOCK_AFTER == CLOCK_AFTER - 1:
                if until == 0:
                    until = now_ns() + self.turn_ns
                elif now_ns() >= until:
                    return True
            count += 1
            if entry.kind == RETURN:
                if self.lent.pop(entry.offset, None) is None:
                    raise Violation(f"a message at {entry.offset} is returned that was not lent")
                self.received += 1
                ring_advance(&self.into)
                continue
            try:
                if not self.opened(&entry):
                    return False
                self.received += 1
                ring_advance(&self.into)
                self.take(&entry)
            except (UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
                raise Violation(str(error)) from None
            except Violation:
                raise
            except Exception as error:
                # this side's own fault: it costs what the message was about, and not those behind it
                log.exception("what came from the other side could not be used")
                self.failed(&entry, error)
            finally:
                self.owner = None
        for line in self.lines:
            if line.waiting or line.returns:
                if self.look():
                    line.late()
                break
        return False

    cdef int take(self, Entry* entry) except -1:
        """One descriptor; its message, if it has one, has been opened."""
        raise NotImplementedError

    cdef int failed(self, const Entry* entry, error) except -1:
        """take() has raised an error of this side's own. Whoever waits for what the descriptor was about is answered with it."""
        return self.give_up(f"what could not be used: {type_name(error)}")

    cdef bint opened(self, const Entry* entry) except -1:
        """Prepares to read a message (rules 2 and 3). False when its segment is still to come, and it is looked at again then."""
        cdef Segment segment = self.segment
        cdef Lease lease
        cdef const char* base
        cdef uint64_t own = entry.size
        if own == 0:
            self.reader.at = self.reader.end = NULL  # reading says that it ends too early
            self.reader.bad = False
            self.data_size = 0
            return True
        if entry.offset & OWN:
            segment = self.own_segment(entry)
            if segment is None:
                return False
            base = segment.base
        elif (entry.offset < self.other or entry.offset > self.other_end
                or entry.length > self.other_end - entry.offset):
            raise Violation(f"a message of {entry.length} bytes at {entry.offset}")
        else:
            base = segment.base + entry.offset
        if own > entry.length:
            raise Violation(f"{own} bytes of a message of {entry.length}")
        self.private = not is_lent(entry)
        if self.private:
            self.owner = PyBytes_FromStringAndSize(base, entry.length)
            base = self.reader.at = PyBytes_AS_STRING(self.owner)
            self.reader.end = base + own
            self.reader.bad = False
        else:
            self.copied_own(base, own)
            lease = Lease.__new__(Lease)
            lease.segment = segment
            lease.line = self.out
            lease.offset = entry.offset
            self.owner = lease
        own = min((own + 63) // 64 * 64, entry.length)
        self.data = base + own
        self.data_size = entry.length - own
        return True

    cdef Segment own_segment(self, const Entry* entry):
        """The segment of a message that lies in one of its own, None when that is still to come."""
        raise Violation(f"a message of {entry.length} bytes at {entry.offset}")

    cdef int place(self, Tensor tensor, const char* data, uint64_t nbytes) except -1:
        """Sets where a tensor of the message lies, which was checked: rule 3."""
        tensor.nbytes = nbytes
        if self.private or (tensor.dtype != DT_BYTES and (<size_t>data) % ALIGNED == 0):
            tensor.owner = self.owner
            tensor.ptr = data
        else:
            tensor.owner = PyBytes_FromStringAndSize(data, nbytes)
            tensor.ptr = PyBytes_AS_STRING(tensor.owner)
        return 0

    def close(self):
        """Nothing more is sent or taken; both areas stay for as long as somebody looks at them."""
        cdef Line line
        self.closed = True
        for line in self.lines:
            line.close()

    def statistics(self) -> dict:
        # type: () -> dict[str, int]
        """What is held, for tests and for looking at it."""
        cdef Line line
        cdef uint64_t small = 0, sent = 0
        for line in self.lines:
            small += line.small_count
            sent += line.sent
        return {
            "lent": len(self.lent), "small": small, "waiting": self.waiting, "used": self.area.used,
            "wakes": self.wakes, "sent": sent, "received": self.received,
        }
