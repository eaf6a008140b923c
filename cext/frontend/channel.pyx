"""The way between the engine and one front end, as both see it: what a Channel (cext/rings) is, and tensors on it.

Rules:
 1. A message waits for room in this side's area as it does for room in the ring: in line. Only one that is larger than the
    area is refused.
 2. Tensors that a front end has received into its memory for bodies are named in a message, not copied into it.
 3. An output that is one of the request's own inputs, or a part of one, where that was received, is named in the response. The
    front end holds its request, and so the input, and then the response, until it has sent that.
 4. What a client writes is no violation. What the rings have no room for is refused by send() and by who packs messages, with
    the limits of those who read them.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t

from neptrio.frontend.kinds cimport HERE, PASSED, RECEIVED, REGION
from neptrio.request.infer_request cimport Tensor
from neptrio.rings.channel cimport Channel
from neptrio.rings.line cimport Line, Queued
from neptrio.rings.message cimport MOST_OWN_PART, pack_head
from neptrio.rings.packet cimport MessageWriter, read_u32, read_u64
from neptrio.rings.ring cimport Entry, Segment, ring_bytes

from neptrio.errors import Overloaded
from neptrio.rings.message import Violation

cdef enum:
    ENTRIES = 4096           # of each ring


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


cdef class FrontChannel(Channel):
    """See the module's text. `bell()` wakes the other side, `late()` asks for look() to be called soon, which is called now and then anyway."""

    def __init__(self, Segment segment not None, layout, bint engine, bell, late):
        # type: (..., Layout, ..., Callable[[], None], Callable[[], None]) -> None
        Channel.__init__(
            self, segment, layout.to_engine if engine else layout.to_front, ENTRIES,
            layout.engine_area if engine else layout.front_area,
            layout.front_area if engine else layout.engine_area, layout.area)
        self.out = self.line(layout.to_front if engine else layout.to_engine, ENTRIES, late, None)
        if engine:
            self.received_first = layout.bodies
            self.received_end = self.received_first + <uint64_t>layout.area
        self.writer = MessageWriter()
        self.bell = bell

    cdef int wake(self, Line line) except -1:
        self.bell()
        return 0

    cdef int send(self, uint32_t kind, uint64_t id, list tensors) except -1:
        """Sends what the writer holds, `tensors` behind it. Raises Overloaded where it can never fit (rule 4)."""
        cdef Entry entry
        cdef MessageWriter writer = self.writer
        cdef list bodies = self.bodies
        self.bodies = None
        if self.closed or self.given_up:
            writer.reset()
            return 0
        if writer.used > MOST_OWN_PART:
            size = writer.used
            writer.reset()
            raise Overloaded(
                f"{size} bytes beside tensors do not fit into a message between the engine and a front end, which has "
                f"room for {<int>MOST_OWN_PART}")
        entry.kind, entry.size, entry.id = kind, <uint32_t>writer.used, id
        entry.offset, entry.length = 0, writer.total()
        if entry.length > self.area.size:
            writer.reset()
            raise Overloaded(
                f"{entry.length} bytes do not fit into the memory between the engine and a front end, which has "
                f"{self.area.size}")
        if self.out.waiting or self.out.reserve(&entry, bodies) is None:
            writer.held = list(tensors)
            self.writer = MessageWriter()
            if not self.out.waiting:
                self.out.late()
            return self.out.wait(&entry, writer, bodies)
        writer.copy(self.segment.base + entry.offset)
        writer.reset()
        return self.push(self.out, &entry)

    cdef bint placed(self, Line line, Queued queued) except -1:
        if line.reserve(&queued.entry, queued.named) is None:
            return False
        queued.writer.copy(self.segment.base + queued.entry.offset)
        queued.writer = None
        return True

    def close(self):
        """See Channel."""
        Channel.close(self)
        self.bell = None

    # ------------------------------------------------------------ tensors

    cdef int pack_tensor(self, Tensor tensor) except -1:
        """Packs a tensor whose bytes are to be copied behind the message. Whoever calls send() holds it until then."""
        cdef MessageWriter writer = self.writer
        pack_head(writer, tensor)
        writer.u32(HERE)
        writer.u64(writer.piece(tensor.ptr, <uint64_t>tensor.nbytes))
        writer.u64(<uint64_t>tensor.nbytes)
        return 0

    cdef int pack_received(self, Tensor tensor) except -1:
        """Packs a tensor that lies in this side's memory for bodies (rule 2)."""
        self.pack_place(tensor, RECEIVED)
        if self.bodies is None:
            self.bodies = []
        self.bodies.append(tensor)
        return 0

    cdef int pack_place(self, Tensor tensor, uint32_t place) except -1:
        """Packs where in the shared memory a tensor lies, not its bytes."""
        cdef MessageWriter writer = self.writer
        pack_head(writer, tensor)
        writer.u32(place)
        writer.u64(<uint64_t>(tensor.ptr - self.segment.base))
        writer.u64(<uint64_t>tensor.nbytes)
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
        self.place(made, data, nbytes)
        return made

    cdef Tensor tensor_in(self, str name, int dtype, tuple shape):
        """A tensor that lies in a region of shared memory."""
        raise Violation("a tensor in a region")

    cdef object owner_of_passed(self, const char* data, uint64_t nbytes):
        """Whose these bytes are, which the other side says are an input's."""
        raise Violation("an input that is passed back")
