"""The way between the engine and one front end, as both see it.

The problem: a request must reach the engine for a few microseconds, whatever the front end does to the memory, and an
answer must come back in the same way. The choice: what isolated models have (cext/rings): two rings of
descriptors, and an area on each side in which it alone keeps the accounts. Both directions are alike, so one class
serves both ends; its subclasses know what messages mean (engine_end, front_end).

Rules:
 1. Everything runs with the GIL, on the trio thread of its process. The one exception is the last reference to a Lease,
    which may go on any thread.
 2. What the other side wrote is believed in nothing: a descriptor is copied before it is looked at, a message's own
    part before it is read; lengths, offsets, counts, datatypes and shapes are compared with what they may be. What
    cannot be is a Violation, and the other side is given up.
 3. A message of up to KEEP_ABOVE bytes is copied whole when it is taken: its memory is free as soon as the ring has
    passed its descriptor. The tensors of a longer one are looked at where they lie until RETURN, so its elements may
    change under the reader's eyes. Elements of numbers may; strings, which have a structure, are always copied.
 4. Nothing is given up for want of room: what does not fit into the ring or the area waits in the outbox, in order, and
    look() is called again; returns alone pass it by. Only a message that is larger than the area is refused.
 5. The other side is woken by `bell` only where it sleeps. A RETURN wakes nobody: who waits for room looks by itself.
 6. Tensors that a front end has received into its memory for bodies are named in a message, not copied into it. They are
    lent with it: such a message is always long enough for a RETURN (rule 3), and until then its sender holds them.
 7. An output that is one of the request's own inputs, or a part of one, where that was received, is named in the response. The
    front end holds its request, and so the input, and then the response, until it has sent that.
 8. Each time that a side says that it sleeps, it is rung for once at most, even where it finds something at once and stays
    awake. So `sleeps` bounds how many rings it may not have read; drain() adds no more than SLEEPS_AT_ONCE to it.
 9. A Violation does not leave this object at the engine: give_up() is where each ends, whichever call finds it, and from then
    on nothing is sent or taken. So no caller, a scheduler or a timer among them, has to expect one.
10. What a client writes is no violation. What the rings have no room for is refused by send() and by who packs messages, with
    the limits of those who read them.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from neptrio.frontend.kinds cimport ALIGNED, HERE, KEEP_ABOVE, PASSED, RECEIVED, REGION, RETURN
from neptrio.request.infer_request cimport DT_BYTES, Tensor
from neptrio.rings.body_area cimport BodyArea, BodyMemory
from neptrio.rings.message cimport MOST_OWN_PART, MessageReader, pack_head
from neptrio.rings.packet cimport Packer, read_u32, read_u64
from neptrio.rings.ring cimport (
    Entry,
    Segment,
    ring_advance,
    ring_bytes,
    ring_head,
    ring_must_wake,
    ring_peek,
    ring_push,
    ring_sleep,
    ring_spin,
    ring_stay,
)

from collections import deque
import logging

from neptrio.errors import Overloaded
from neptrio.rings.message import Violation

cdef enum:
    ENTRIES = 4096           # of each ring
    SMALL = 8192             # more than ENTRIES
    REAP_ABOVE = 32          # messages that the other side may have taken before their memory is looked after
    AT_ONCE = 256            # descriptors taken before other events have their turn
    SLEEPS_AT_ONCE = 16      # attempts to sleep that something came into, before other events have theirs

log = logging.getLogger("neptrio.frontend")


class Layout:
    """Where things lie in the shared memory: the ring to the engine, the ring to the front end, the front end's area,
    the engine's, the front end's for bodies: slow clients may fill that with half of their bodies, and messages have room.
    `area`: bytes of each; pages that are never touched take no memory."""

    def __init__(self, size_t area):
        self.to_engine = 0
        self.to_front = ring_bytes(ENTRIES)  # type: int
        self.front_area = (2 * ring_bytes(ENTRIES) + 4095) // 4096 * 4096  # type: int
        self.engine_area = self.front_area + area  # type: int
        self.area = area
        self.bodies = self.engine_area + area  # type: int
        self.size = self.bodies + area  # type: int


@cython.no_gc
cdef class Lease:
    """The right to look at a message of the other side where it lies."""

    cdef Segment segment     # alive as long as somebody looks
    cdef Channel channel
    cdef uint64_t offset

    def __dealloc__(self):
        if self.channel is not None:
            try:
                self.channel.post(RETURN, 0, self.offset, 0)
            except Violation:
                pass   # at a front end, which does not go on without the engine


cdef class Channel(MessageReader):
    """See the module's text. `bell()` wakes the other side, `late()` asks for look() to be called soon."""

    def __cinit__(self):
        self.small = <Small*>malloc(SMALL * sizeof(Small))
        if self.small == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.small)

    def __init__(self, Segment segment not None, layout, bint engine, bell, late):
        # type: (..., Layout, ..., Callable[[], None], Callable[[], None]) -> None
        self.segment = segment
        self.out.base = segment.base + <size_t>(layout.to_front if engine else layout.to_engine)
        self.into.base = segment.base + <size_t>(layout.to_engine if engine else layout.to_front)
        self.out.entries = self.into.entries = ENTRIES
        self.area = BodyArea(segment, layout.engine_area if engine else layout.front_area, layout.area)
        self.other = layout.front_area if engine else layout.engine_area
        self.other_end = self.other + <uint64_t>layout.area
        if engine:
            self.received_first = layout.bodies
            self.received_end = self.received_first + <uint64_t>layout.area
        self.packer = Packer()
        self.lent = {}
        self.outbox = deque()
        self.returns = deque()
        self.bell = bell
        self.late = late
        self.sleeps = 1
        ring_sleep(&self.into)   # the first push rings the bell

    cdef int give_up(self, str why) except -1:
        """The other side has written what cannot be (rule 9)."""
        if not self.given_up:
            self.given_up = True
            self.violated(why)
        return 0

    def violated(self, why):
        # type: (str) -> None
        """Called once, when the other side has written what cannot be."""
        raise Violation(why)

    # ------------------------------------------------------------ out

    cdef int send(self, uint32_t kind, uint64_t id, list tensors) except -1:
        """Sends what the packer holds, `tensors` behind it. Raises Overloaded where it can never fit (rule 10)."""
        cdef Entry entry
        cdef Packer packer = self.packer
        cdef list bodies = None
        if self.bodies is not None:
            bodies, self.bodies = self.bodies, None
        if self.closed or self.given_up:
            packer.reset()
            return 0
        if packer.used > MOST_OWN_PART:
            size = packer.used
            packer.reset()
            raise Overloaded(
                f"{size} bytes beside tensors do not fit into a message between the engine and a front end, which has "
                f"room for {<int>MOST_OWN_PART}")
        entry.kind, entry.size, entry.id = kind, <uint32_t>packer.used, id
        entry.offset, entry.length = 0, packer.total()
        if bodies is not None and entry.length <= KEEP_ABOVE:
            entry.length = KEEP_ABOVE + 1
        if entry.length > self.area.size:
            packer.reset()
            raise Overloaded(
                f"{entry.length} bytes do not fit into the memory between the engine and a front end, which has "
                f"{self.area.size}")
        if self.outbox or not self.place(&entry, packer, bodies):
            packer.held = list(tensors)
            self.packer = Packer()
            return self.wait(&entry, packer, bodies)
        packer.reset()
        if not self.push(&entry):
            self.wait(&entry, None, None)
        return 0

    cdef int post(self, uint32_t kind, uint64_t id, uint64_t offset, uint64_t length) except -1:
        """Sends a descriptor without a message."""
        cdef Entry entry
        if self.closed or self.given_up:
            return 0
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, offset, length
        if kind == RETURN:
            # never behind messages that wait for room, which the other side may wait to be given by this very return
            if not self.push(&entry):
                self.returns.append(offset)
        elif self.outbox or not self.push(&entry):
            self.wait(&entry, None, None)
        return 0

    cdef bint place(self, Entry* entry, Packer packer, list bodies) except -1:
        """Copies a message into this side's area; False when there is no room now."""
        cdef BodyMemory memory
        cdef int64_t offset
        if self.small_count >= REAP_ABOVE:
            self.reap()
        if entry.length <= KEEP_ABOVE:
            offset = self.area.slab.take(entry.length)
            if offset < 0 and self.small_count:
                self.reap()
                offset = self.area.slab.take(entry.length)
            if offset < 0:
                return False
            entry.offset = <uint64_t>offset
        else:
            if self.small_count:
                self.reap()
            memory = self.area.take(entry.length)
            if memory is None:
                return False
            entry.offset = memory.block.offset
            self.lent[entry.offset] = memory if bodies is None else (memory, bodies)
        packer.copy(self.segment.base + entry.offset)
        return True

    cdef bint push(self, const Entry* entry) except -1:
        """False when the ring is full."""
        cdef Small* kept
        cdef int done = ring_push(&self.out, entry)
        if done < 0:
            self.give_up("its index of a ring cannot be")
            return False
        if done == 0:
            return False
        self.sent += 1
        if entry.size and entry.length <= KEEP_ABOVE:
            if self.small_count == SMALL:
                self.reap()  # makes room: the ring has fewer entries
            kept = &self.small[(self.small_first + self.small_count) % SMALL]
            kept.behind, kept.offset, kept.size = self.out.own, entry.offset, entry.length
            self.small_count += 1
        if entry.kind != RETURN and ring_must_wake(&self.out):
            self.wakes += 1
            self.bell()
        return True

    cdef int wait(self, const Entry* entry, Packer packer, list bodies) except -1:
        if not self.outbox:
            self.late()
        self.outbox.append((entry.kind, entry.size, entry.id, entry.offset, entry.length, packer, bodies))
        return 0

    cdef int reap(self) except -1:
        """Frees the memory of small messages whose descriptors the other side has taken, and so copied."""
        cdef uint64_t head = ring_head(&self.out)
        cdef uint64_t waiting = self.out.own - head
        cdef Small* oldest
        if waiting > self.out.entries:
            return self.give_up("its index of a ring cannot be")
        while self.small_count:
            oldest = &self.small[self.small_first]
            if self.out.own - oldest.behind < waiting:
                return 0
            self.small_first = (self.small_first + 1) % SMALL
            self.small_count -= 1
            self.area.give(oldest.offset, oldest.size)
        return 0

    def look(self) -> bool:
        """Sends what waits for room, as far as there is some; True when something waits still."""
        cdef Entry entry
        outbox = self.outbox
        if self.closed or self.given_up:
            return False
        while self.returns:
            entry.kind, entry.size, entry.id, entry.offset, entry.length = RETURN, 0, 0, self.returns[0], 0
            if not self.push(&entry):
                return True
            self.returns.popleft()
        while outbox:
            entry.kind, entry.size, entry.id, entry.offset, entry.length, packer, bodies = outbox[0]
            if packer is not None:
                if not self.place(&entry, packer, bodies):
                    return True
                outbox[0] = (entry.kind, entry.size, entry.id, entry.offset, entry.length, None, None)
            if not self.push(&entry):
                return True
            outbox.popleft()
        if self.small_count:
            self.reap()
        return False

    # ------------------------------------------------------------ in

    def comes(self, int64_t spin_ns) -> bool:
        """Whether there is something for drain(), or comes within `spin_ns`; nobody rings for that. When nothing has come,
        the other side rings again as if one slept. Without the GIL."""
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
        cdef int got, count = 0, slept = 0
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
            count += 1
            self.received += 1
            if entry.kind == RETURN:
                if self.lent.pop(entry.offset, None) is None:
                    raise Violation(f"a message at {entry.offset} is returned that was not lent")
                ring_advance(&self.into)
                continue
            if entry.size:
                self.opened(&entry)
            # a copy has been made of what is small, so its memory may be used again from here on
            ring_advance(&self.into)
            try:
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
        if self.outbox or self.returns:
            self.look()
        return False

    cdef int take(self, Entry* entry) except -1:
        """One descriptor; its message, if it has one, has been opened."""
        raise NotImplementedError

    cdef int failed(self, const Entry* entry, error) except -1:
        """take() has raised an error of this side's own. Whoever waits for what the descriptor was about is answered with it."""
        return 0

    cdef int opened(self, const Entry* entry) except -1:
        """Prepares to read a message (rules 2 and 3)."""
        cdef Lease lease
        cdef const char* base
        cdef uint64_t own = entry.size
        if (entry.offset < self.other or entry.offset > self.other_end
                or entry.length > self.other_end - entry.offset):
            raise Violation(f"a message of {entry.length} bytes at {entry.offset}")
        if own > entry.length:
            raise Violation(f"{own} bytes of a message of {entry.length}")
        base = self.segment.base + entry.offset
        self.private = entry.length <= KEEP_ABOVE
        if self.private:
            self.owner = PyBytes_FromStringAndSize(base, entry.length)
            base = self.reader.at = PyBytes_AS_STRING(self.owner)
            self.reader.end = base + own
            self.reader.bad = False
        else:
            self.copied_own(base, own)
            lease = Lease.__new__(Lease)
            lease.segment = self.segment
            lease.channel = self
            lease.offset = entry.offset
            self.owner = lease
        own = min((own + 63) // 64 * 64, entry.length)
        self.data = base + own
        self.data_size = entry.length - own
        return 0

    # ------------------------------------------------------------ tensors

    cdef int pack_tensor(self, Tensor tensor) except -1:
        """Packs a tensor whose bytes are to be copied behind the message. Whoever calls send() holds it until then."""
        cdef Packer packer = self.packer
        pack_head(packer, tensor)
        packer.u32(HERE)
        packer.u64(packer.piece(tensor.ptr, <uint64_t>tensor.nbytes))
        packer.u64(<uint64_t>tensor.nbytes)
        return 0

    cdef int pack_received(self, Tensor tensor) except -1:
        """Packs a tensor that lies in this side's memory for bodies (rule 6)."""
        self.pack_place(tensor, RECEIVED)
        if self.bodies is None:
            self.bodies = []
        self.bodies.append(tensor)
        return 0

    cdef int pack_place(self, Tensor tensor, uint32_t place) except -1:
        """Packs where in the shared memory a tensor lies, not its bytes."""
        cdef Packer packer = self.packer
        pack_head(packer, tensor)
        packer.u32(place)
        packer.u64(<uint64_t>(tensor.ptr - self.segment.base))
        packer.u64(<uint64_t>tensor.nbytes)
        return 0

    cdef Tensor tensor(self):
        """The next tensor, checked."""
        cdef Tensor made = self.head()   # datatype 0 is one that the client has made up
        cdef uint32_t place = read_u32(&self.reader)
        cdef uint64_t offset, nbytes
        cdef const char* data
        if place == REGION:
            return self.tensor_in(made.name, made.dtype, made.shape)
        offset = read_u64(&self.reader)
        nbytes = read_u64(&self.reader)
        self.finish()
        if place == HERE and offset <= self.data_size and nbytes <= self.data_size - offset:
            data = self.data + offset
        elif (place == RECEIVED and not self.private and self.received_first <= offset < self.received_end
                and nbytes <= self.received_end - offset):
            data = self.segment.base + offset
        elif place == PASSED and offset <= self.segment.size and nbytes <= self.segment.size - offset:
            made.nbytes = nbytes
            made.ptr = self.segment.base + offset
            made.owner = self.owner_of_passed(made.ptr, nbytes)
            return made
        else:
            raise Violation(f"a tensor at place {place} outside of its message, and of what may be received")
        made.nbytes = nbytes
        if self.private or (made.dtype != DT_BYTES and (<size_t>data) % ALIGNED == 0):
            made.owner = self.owner
            made.ptr = data
        else:
            made.owner = PyBytes_FromStringAndSize(data, nbytes)
            made.ptr = PyBytes_AS_STRING(made.owner)
        return made

    cdef Tensor tensor_in(self, str name, int dtype, tuple shape):
        """A tensor that lies in a region of shared memory."""
        raise Violation("a tensor in a region")

    cdef object owner_of_passed(self, const char* data, uint64_t nbytes):
        """Whose these bytes are, which the other side says are an input's."""
        raise Violation("an input that is passed back")

    # ------------------------------------------------------------ the end

    def close(self):
        """Nothing more is sent or taken; both areas stay for as long as somebody looks at them."""
        cdef Small* kept
        if self.closed:
            return
        self.closed = True
        self.lent = {}
        while self.small_count:
            self.small_count -= 1
            kept = &self.small[(self.small_first + self.small_count) % SMALL]
            self.area.give(kept.offset, kept.size)
        for kind, size, id, offset, length, packer, _ in self.outbox:
            if packer is None and size and length <= KEEP_ABOVE:  # has its memory, but no place in the ring
                self.area.give(offset, length)
        self.outbox.clear()
        self.returns.clear()
        self.bell = self.late = None

    def statistics(self) -> dict:
        # type: () -> dict[str, int]
        """What is held, for tests and for looking at it."""
        return {
            "lent": len(self.lent), "small": self.small_count, "waiting": len(self.outbox), "used": self.area.used,
            "wakes": self.wakes, "sent": self.sent, "received": self.received,
        }
