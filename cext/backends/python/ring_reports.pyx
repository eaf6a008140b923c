"""What a model's process reports of its statistics, and what waits to be counted: Triton's compiled backends report their own.

Rules:
 1. A request whose answer goes out while a report may still come is in `uncounted` until that, its release or the end comes.
 2. An execution that was counted as it was measured, with a request that is answered or released later, is in `measured`: a
    report of it takes that count's place. Which it is says its batch's number.
 3. Of both there are at most so many, whatever a process says: what is oldest stays counted as it was measured.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.python.ring_sender cimport BatchUnderWay, RingSender
from neptrio.execution.batch cimport Batch
from neptrio.observe.counters cimport ModelCounters
from neptrio.observe.stated cimport Stated
from neptrio.observe.trace cimport Trace
from neptrio.request.infer_request cimport DONE, InferRequest, now_ns
from neptrio.rings.kinds cimport *
from neptrio.rings.packet cimport Reader, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Segment

from neptrio.foreign import valid
from neptrio.rings.message import Violation

cdef uint64_t MOST_TIME = (1 << 62) - 1

cdef enum:
    MOST_UNCOUNTED = 65536
    MOST_MEASURED = 1024
    MOST_EARLY = 1024        # reports of an execution whose batch is not back


cdef class ReportedSide(RingSender):
    """See the module's text; ServerSide (ring_server) is the whole end."""

    def __init__(self, Segment segment not None, layout, host):
        RingSender.__init__(self, segment, layout, host)
        self.open = {}
        self.uncounted = {}
        self.measured = {}

    cdef InferRequest find(self, uint64_t id):
        """A request that the process may still answer, or None."""
        cdef BatchUnderWay under_way
        cdef uint64_t place = id & ((1 << REQUEST_BITS) - 1)
        request = self.open.get(id)
        if request is None:
            under_way = self.batches.get(id >> REQUEST_BITS)
            if under_way is not None and place < <uint64_t>len(under_way.batch.requests):
                request = under_way.batch.requests[place]
        return request

    cdef int await_report(self, uint64_t id, InferRequest request) except -1:
        """Keeps what counts an answered request, where its report or release is still to come: rule 1."""
        if request.stated is None or not (<Stated>request.stated).awaited:
            return 0
        self.uncounted[id] = request.stated
        if len(self.uncounted) > MOST_UNCOUNTED:
            self.counters.reported(self.uncounted.pop(next(iter(self.uncounted))), RELEASED, None)
        return 0

    cdef int count_the_rest(self) except -1:
        """The process is gone: nothing is reported any more."""
        for stated in self.uncounted.values():
            self.counters.reported(stated, RELEASED, None)
        self.uncounted, self.measured = {}, {}
        return 0

    cdef int measured_here(self, uint64_t number, Batch batch) except -1:
        """Remembers how a batch was counted: rule 2."""
        if number not in self.measured and len(self.measured) >= MOST_MEASURED:
            del self.measured[next(iter(self.measured))]
        self.measured.setdefault(number, []).append((
            batch.size, batch.input_end - batch.compute_start, batch.output_start - batch.input_end,
            batch.compute_end - batch.output_start))
        return 0

    cdef list stated(self, uint64_t number):
        """Reads what is reported of requests and executions. Returns those executions that are of batch `number`, None for none;
        0 is no batch's."""
        cdef Reader* reader = &self.reader
        cdef InferRequest request
        cdef uint64_t id, of
        cdef uint32_t i, how, count = read_u32(reader)
        cdef list own = None
        for i in range(count):
            if reader.bad:
                break
            id = read_u64(reader)
            how = read_u32(reader)
            times = four_times(reader) if how == SUCCEEDED or how == FAILED else None
            if times is None and how != LATER and how != RELEASED:
                raise Violation(f"a request whose outcome is {how}")
            request = self.find(id)
            if request is not None and request.state != DONE:
                known = request.stated
                if times is not None or known is None or (how == RELEASED and (<Stated>known).how == LATER):
                    request.stated = Stated(how, times)
            elif how != LATER and id in self.uncounted:
                self.counters.reported(self.uncounted.pop(id), how, times)
        count = read_u32(reader)
        for i in range(count):
            if reader.bad:
                break
            of = read_u64(reader)
            row = (read_u64(reader), *four_times(reader))
            if reader.bad:
                break
            if number and of == number:
                if own is None:
                    own = []
                own.append(row)
            elif self.counters is not None:
                self.executed_before(of, row)
        return own

    cdef int executed_before(self, uint64_t number, tuple row) except -1:
        """An execution is reported that is not the one whose answers are read."""
        cdef BatchUnderWay under_way = self.batches.get(number)
        cdef list rows = self.measured.get(number)
        if rows:
            self.counters.execution_reported(row, rows.pop())
            if not rows:
                del self.measured[number]
        elif under_way is None:
            self.counters.execution_reported(row, None)
        else:
            if under_way.reported is None:
                under_way.reported = []
            if len(under_way.reported) < MOST_EARLY:
                under_way.reported.append(row)
        return 0

    cdef int activity(self, uint64_t id) except -1:
        """Reads a point in time of a request's trace."""
        cdef uint64_t ns = read_u64(&self.reader)
        cdef InferRequest request = self.find(id)
        name = read_text(&self.reader)
        self.finish()
        if request is not None and request.trace is not None:
            (<Trace>request.trace).activity(valid(name), <int64_t>min(ns, MOST_TIME))
        return 0

    cdef int reported(self, uint64_t place) except -1:
        """Reads the durations of a response."""
        cdef uint32_t outcome = read_u32(&self.reader)
        cdef uint64_t computing = read_u64(&self.reader), output = read_u64(&self.reader)
        cdef uint64_t now = <uint64_t>now_ns()  # nothing takes longer than since the machine was started
        self.finish()
        if outcome > CANCELLED:
            raise Violation(f"a response whose outcome is {outcome}")
        self.host.response_measured(place, outcome, min(computing, now), min(output, now))
        return 0


cdef tuple four_times(Reader* reader):
    """Nanoseconds, as many as a signed number can be."""
    cdef uint64_t most = <uint64_t>now_ns()
    cdef uint64_t began = read_u64(reader), made = read_u64(reader), executed = read_u64(reader), ended = read_u64(reader)
    return min(began, most), min(made, most), min(executed, most), min(ended, most)
