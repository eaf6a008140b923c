"""What the server says to one life of a model's process: descriptors on its rings, messages in its memory.

Rules:
 1. Everything here runs on the trio thread. The one exception is a Parcel's copy, which an instance
    thread does without the GIL.
 2. What does not fit into its ring waits in that ring's own line, in order; a message whose bytes are still being copied
    keeps its place there. What waits for one ring never waits for the other: the process may take nothing of the one
    until it has heard something on the other.
 3. Blocks of the process's inputs live as long as the process looks at them and as long as a response
    of ours does (a model that returns its input).
 4. A ring that is full wakes its consumer, whatever lies in it. A RETURN wakes nobody otherwise: it is taken with what
    comes next.
 5. A tensor that was received into the bodies' area (cext/rings/body_area) is not copied: the message says where
    it lies. The process has been able to change it since it came; that is its own request.
"""
from libc.stdint cimport uint32_t, uint64_t

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport WorkItem
from neptrio.request.infer_request cimport DT_BYTES, InferRequest, InferResponse, RequestedOutput, Tensor, element_size, now_ns
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.kinds cimport *
from neptrio.rings.message cimport pack_head
from neptrio.rings.packet cimport Packer
from neptrio.rings.ring cimport Entry, RingEnd, Segment, ring_bytes, ring_must_wake, ring_push, ring_wake
from neptrio.rings.slab cimport Block, Slab, block_of

from collections import deque
import json

from triton_python_backend_utils._process.reserved import sealed_memory

cdef enum:
    WORK_ENTRIES = 256
    CONTROL_ENTRIES = 1024
    DONE_ENTRIES = 1024
    COPY_ON_LOOP = 1114112   # bytes: a MiB of tensors and what surrounds it; more is copied by the instance's thread

cdef object _dumps = json.dumps


class Layout:
    """Where things lie in the shared memory: three rings, the server's area, that of received bodies, the process's."""

    def __init__(self, size_t area, size_t bodies=0):
        self.area = area
        self.work = 0
        self.work_entries = WORK_ENTRIES
        self.control = self.work + ring_bytes(WORK_ENTRIES)  # type: int
        self.control_entries = CONTROL_ENTRIES
        self.done = self.control + ring_bytes(CONTROL_ENTRIES)  # type: int
        self.done_entries = DONE_ENTRIES
        self.inputs = (self.done + ring_bytes(DONE_ENTRIES) + 4095) // 4096 * 4096  # type: int
        self.bodies = self.inputs + area  # type: int
        self.outputs = self.bodies + bodies  # type: int
        self.size = self.outputs + area  # type: int


cdef class Under:
    """See ring_sender.pxd."""


cdef class Parcel(WorkItem):
    """See ring_sender.pxd."""

    cpdef object execute(self):
        cdef Packer packer = self.packer
        cdef char* target = self.target
        with nogil:
            packer.copy_offering(target)

    cpdef object deliver(self):
        self.ready = True
        self.packer = None
        self.end.flush()


cdef class RingSender:
    """The server's half of what is said; ServerEnd (ring_server) is the whole end."""

    def __init__(self, Segment segment not None, layout, host):
        self.segment = segment
        self.work.base = segment.base + <size_t>layout.work
        self.work.entries = layout.work_entries
        self.control.base = segment.base + <size_t>layout.control
        self.control.entries = layout.control_entries
        self.slab = Slab(layout.inputs, layout.area)
        self.bodies = BodyArea(segment, layout.bodies, layout.outputs - layout.bodies)
        self.host = host
        self.packer = Packer()
        self.batches = {}
        self.blocks = {}
        self.work_line = deque()
        self.control_line = deque()

    cdef int push(self, bint work_ring, const Entry* entry) except -1:
        """Pushes in order, or puts it in line. Wakes the process where it sleeps."""
        cdef Parcel parcel
        cdef object line = self.work_line if work_ring else self.control_line
        if self.closed:
            return 0
        if not line:
            done = self.push_now(work_ring, entry)
            if done < 0:
                return 0
            if done:
                if entry.kind != RETURN:
                    self.wake(work_ring)
                return 0
            self.host.lag()  # a process that sleeps afterwards says nothing
        parcel = Parcel()
        parcel.end = self
        parcel.entry = entry[0]
        parcel.ready = True
        line.append(parcel)
        return 0

    cdef int push_now(self, bint work_ring, const Entry* entry) except -2:
        """Pushes: 1, or 0 when the ring is full, whose consumer is woken; -1 when the process broke it."""
        cdef int done = ring_push(&self.work if work_ring else &self.control, entry)
        if done > 0:
            self.pushed(entry)
        elif done < 0:
            self.broken("its index of a ring cannot be")
        else:
            self.wake(work_ring)
        return done

    cdef int wake(self, bint work_ring) except -1:
        """Wakes the consumer of a ring if it sleeps."""
        cdef RingEnd* ring = &self.work if work_ring else &self.control
        if ring_must_wake(ring):
            self.wakes += 1
            ring_wake(ring)
        return 0

    cdef int pushed(self, const Entry* entry) except -1:
        """Notes where a batch's descriptor lies, and when it had been copied."""
        cdef Under under
        if entry.kind == BATCH:
            under = self.batches.get(entry.id)
            if under is not None:
                under.place = self.work.own
                # for requests that are answered before the process has said when it had its inputs
                under.batch.input_end = now_ns()
        return 0

    cdef int post(self, bint work_ring, uint32_t kind, uint64_t id, uint64_t offset, uint64_t length) except -1:
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, offset, length
        return self.push(work_ring, &entry)

    def flush(self):
        """Pushes what waits in line for each ring, as far as there is room."""
        self.flush_line(True)
        self.flush_line(False)

    cdef int flush_line(self, bint work_ring) except -1:
        cdef Parcel parcel
        cdef object line = self.work_line if work_ring else self.control_line
        while line and not self.closed:
            parcel = line[0]
            if not parcel.ready:
                return 0
            done = self.push_now(work_ring, &parcel.entry)
            if done < 0:
                return 0
            if not done:
                self.host.lag()
                return 0
            line.popleft()
            if parcel.entry.kind != RETURN:
                self.wake(work_ring)
        return 0

    @property
    def waiting(self) -> int:
        """Descriptors that wait in line for room in their ring, or for their bytes."""
        return len(self.work_line) + len(self.control_line)

    def body_memory(self, uint64_t size):
        """Writable memory into which a body to this process can be received; None when there is no room for it."""
        return None if self.closed else self.bodies.take(size)

    @property
    def body_bytes(self) -> int:
        """Bytes of what body_memory() has given and somebody uses."""
        return self.bodies.used

    def holds_body(self, Tensor tensor not None) -> bool:
        """The tensor lies in what body_memory() has given."""
        return self.bodies.holds(tensor.ptr, <uint64_t>tensor.nbytes)

    def received_here(self, Batch batch not None) -> bool:
        """A tensor of the batch lies in memory that the process could write to."""
        cdef InferRequest request
        cdef Tensor tensor
        for request in batch.requests:
            for tensor in request.inputs:
                if self.bodies.holds(tensor.ptr, <uint64_t>tensor.nbytes):
                    return True
        return False

    cdef int send(self, bint work_ring, uint32_t kind, uint64_t id, Packer packer, Under under, mailbox) except -1:
        """Sends the packed message; what is large is copied by the thread behind `mailbox`."""
        cdef Entry entry
        cdef Parcel parcel
        cdef Segment segment
        cdef Block block
        cdef char* target
        cdef uint64_t total = packer.total()
        entry.kind, entry.size, entry.id, entry.length = kind, <uint32_t>packer.used, id, total
        block = block_of(self.slab, total)
        if block is not None:
            entry.offset = block.offset
            target = self.segment.base + block.offset
            self.blocks[entry.offset] = block
            if under is not None:
                under.block = block
        else:
            self.number += 1
            segment = Segment(sealed_memory("neptrio-message", total), total)
            entry.offset = OWN | self.number
            target = segment.base
            self.blocks[entry.offset] = segment
            self.host.send_segment(segment, self.number)
        if under is not None and under.bodies is not None:
            self.blocks[entry.offset] = (self.blocks[entry.offset], under.bodies)
        if total > COPY_ON_LOOP and mailbox is not None:
            parcel = Parcel()
            parcel.end = self
            parcel.entry = entry
            parcel.packer = packer
            parcel.target = target
            self.packer = Packer()
            line = self.work_line if work_ring else self.control_line
            line.append(parcel)
            try:
                mailbox.submit(parcel)
            except BaseException:
                line.remove(parcel)  # nobody would ever copy it, and what comes behind it waits
                raise
            return 0
        packer.copy(target)
        packer.reset()  # not only before the next message, which may come late: it holds the tensors
        return self.push(work_ring, &entry)

    cdef int pack_request(self, Packer packer, InferRequest request, Under under) except -1:
        cdef Tensor tensor
        cdef RequestedOutput output
        cdef uint32_t flags = 0
        cdef object context = None, state
        if request.sequence_start:
            flags |= START
        if request.sequence_end:
            flags |= END
        if type(request.sequence_id) is str:
            flags |= TEXT_ID
        if request.parameters:
            flags |= PARAMETERS
        if request.outputs is not None:
            flags |= NAMES
        if request.trace is not None:
            flags |= TRACED
            context = request.trace.context()
            if context is not None:
                flags |= CONTEXT
        packer.u32(flags)
        packer.u32(<uint32_t>len(request.inputs))
        packer.u64(request.timeout_us)
        if flags & TEXT_ID:
            packer.text(request.sequence_id)
        else:
            packer.u64(request.sequence_id)
        packer.text(request.id)
        if context is not None:
            packer.text(context)
        if flags & PARAMETERS:
            packer.text(_dumps(request.parameters))
        if flags & NAMES:
            state = request.model.state_outputs
            packer.u32(<uint32_t>(len(request.outputs) + len(state)))
            packer.u32(<uint32_t>len(state))
            for output in request.outputs:
                packer.text(output.name)
            for name in state:
                packer.text(name)
        for tensor in request.inputs:
            if self.bodies.holds(tensor.ptr, <uint64_t>tensor.nbytes) and self.fit(tensor):
                pack_tensor(packer, tensor, tensor.ptr - self.segment.base)
                self.in_place_out += tensor.nbytes
                if under.bodies is None:
                    under.bodies = []
                under.bodies.append(tensor)
            else:
                pack_tensor(packer, tensor, 0)
                self.copied_out += tensor.nbytes
        return 0

    cdef bint fit(self, Tensor tensor) noexcept:
        """Whether a tensor of the bodies' area can be used where it lies: numbers, aligned as numpy wants them."""
        return (tensor.dtype != DT_BYTES and tensor.nbytes > 0 and tensor.memory_kind == 0
                and (tensor.ptr - self.segment.base) % element_size(tensor.dtype) == 0)

    def sequence_ended(self, sequence_id, str reason):
        """Sends the end of a sequence, in line with the batches."""
        cdef Packer packer = self.packer
        packer.reset()
        packer.u32(1 if isinstance(sequence_id, str) else 0)
        if isinstance(sequence_id, str):
            packer.text(sequence_id)
        else:
            packer.u64(sequence_id)
        packer.text(reason)
        self.send(True, SEQUENCE_END, 0, packer, None, None)

    def look(self):
        """Has the main thread look at what came over the socket."""
        self.post(True, LOOK, 0, 0, 0)

    def respond(self, uint64_t key, InferResponse response, bint final, bint waits, dict numbers):
        # type: (..., InferResponse | None, ..., ..., ...) -> None
        """Sends a response of another model. `waits`: the process's main thread does nothing else."""
        cdef Packer packer = self.packer
        cdef Tensor tensor
        if self.closed:
            return
        packer.reset()
        packer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        if response is not None:
            packer.u32(ERROR if response.error is not None else RESPONSE)
            packer.text(_dumps(response.parameters) if response.parameters else "")
            if response.error is not None:
                packer.text(str(response.error))
                packer.u32(numbers.get(response.error.code, 0))
            else:
                packer.u32(<uint32_t>len(response.outputs or ()))
                for tensor in response.outputs or ():
                    pack_tensor(packer, tensor, 0)
                    self.copied_out += tensor.nbytes
        self.send(waits, ANSWER if waits else CALL_RESPONSE, key, packer, None, None)

    cdef int give_back(self, uint64_t offset) except -1:
        return self.post(False, RETURN, 0, offset, 0)

    def return_memory(self, uint64_t offset):
        """give_back(), for tests."""
        self.give_back(offset)

    cdef int broken(self, str text) except -1:
        """The process has written what no correct one writes."""
        if not self.closed:
            self.closed = True
            self.host.violated(text)
        return 0


cdef int pack_tensor(Packer packer, Tensor tensor, uint64_t placed) except -1:
    """`placed`: where in the shared memory its bytes lie already, 0 where they are to be copied behind the message."""
    pack_head(packer, tensor)
    packer.u32(GIVEN if placed else HERE)
    packer.u64(placed if placed else packer.piece(tensor.ptr, <uint64_t>tensor.nbytes))
    packer.u64(<uint64_t>tensor.nbytes)
    if not placed:
        packer.held.append(tensor)
    return 0
