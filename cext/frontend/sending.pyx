"""When front ends send the answers to traced requests: what they note of it, and how the engine waits for it.

The problem: a trace is the engine's, and tells when its request's answer was sent, which a front end does, a moment after the
engine has answered. The choice: transports in a front end find in request.trace what they find there in the engine, a
Trace, and tell it of their sending in the same way; this one sends what they tell to the engine, as a descriptor
without a message. Both processes read one monotonic clock. The engine's trace stays open until the descriptor has come.

Rules:
 1. SENT is owed for every response that was TRACED, in the order of the responses. One that says 0 stands for all that is
    owed for its request: the client is gone.
 2. The engine waits for nobody in vain: when a front end has ended, traces end without the times that it owes, and one
    that owes MOST_AWAITED is asked for no more; such traces have the engine's own times.
 3. What SENT says is believed within what can be: not before the engine made the response, not after now. One that nobody
    waits for means nothing, since its trace may have ended.
 4. A client that has an answer finds its trace. A front end pushes SENT in the pass that has flushed the answer, or moments
    later where a task of hypercorn's does that; before it says to the engine that it has told of everything it looks at
    `Sends.open`.
"""
from libc.stdint cimport int64_t, uint64_t

from neptrio.frontend.channel cimport Channel
from neptrio.frontend.kinds cimport SENT
from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.observe.trace cimport Trace, Tracing
from neptrio.request.infer_request cimport InferRequest, InferResponse

from neptrio.rings.message import Violation

cdef enum:
    MOST_AWAITED = 16384     # traces of one front end that are not told of


cdef class Awaited:
    """Traces of one front end's requests that wait for SENT. In the engine."""

    def __cinit__(self):
        self.traces = {}

    cdef bint wants(self, Trace trace) except -1:
        """Whether the response that is about to cross is to be TRACED; expect() is to be called when it has."""
        return trace.has_more() and (trace.handed > 0 or len(self.traces) < MOST_AWAITED)

    cdef int expect(self, object key, Trace trace) except -1:
        """A response of the request with that number crosses, and is TRACED."""
        cdef Trace other = self.traces.get(key)
        if other is not None and other is not trace:
            other.abandon()     # the front end has used the number again, so it will not tell of this one
        self.traces[key] = trace
        trace.hand_on()
        return 0

    cdef int told(self, uint64_t id, uint64_t start, uint64_t end) except -1:
        """SENT has come."""
        cdef Trace trace = self.traces.get(id)
        cdef uint64_t most = <uint64_t>1 << 62
        if trace is None:
            return 0
        if not end:
            trace.abandon()
        elif trace.sent_there(<int64_t>min(start, most), <int64_t>min(end, most)):
            return 0
        del self.traces[id]
        return 0

    cdef int gone(self) except -1:
        """The front end has ended."""
        traces, self.traces = self.traces, {}
        for trace in traces.values():
            trace.abandon()
        return 0


cdef int follow(object trace) except -1:
    (<Sending>trace).follow()
    return 0


cdef class Sends(Tracing):
    """What the traces of a front end have in common."""

    def __cinit__(self):
        self.loop_pass = LoopPassCore()   # until attach()
        self.open = set()

    def attach(self, LoopPassCore loop_pass not None):
        """Sets the loop pass, which tells traces when their answers were sent."""
        self.loop_pass = loop_pass
        loop_pass.follower = Sending
        loop_pass.follow = follow

    cdef Sending begin(self, Channel channel, InferRequest request, uint64_t id):
        """The request's trace, from its first response on that is TRACED or has headers of its trace."""
        cdef Sending trace = Sending.__new__(Sending)
        trace.channel = channel
        trace.record.id = <int64_t>id
        trace.record.front = request.responder.protocol
        trace.sampler = self
        trace.request = request
        request.trace = trace
        self.open.add(id)
        return trace


cdef class Sending(Trace):
    """A traced request in a front end, while its answer is sent."""

    cdef object comes(self, InferResponse response, bint final):
        """A response that is TRACED has come; the transport is about to get it."""
        self.owed += 1
        self.answering(response, final, 0)

    cdef object mark_sent(self, int64_t made, int64_t start, int64_t end):
        self.record.send_end = end      # those behind the first are in `waiting`
        if self.owed:
            self.owed -= 1
            self.tell(start if made <= start <= end else made, end)

    cdef object close(self):
        if self.request is None:
            return
        self.request = None
        (<Sends>self.sampler).open.discard(<uint64_t>self.record.id)
        if self.owed:
            self.tell(0, 0)
        self.channel = None

    cdef int tell(self, int64_t start, int64_t end) except -1:
        try:
            self.channel.post(SENT, <uint64_t>self.record.id, <uint64_t>start, <uint64_t>end)
        except Violation:
            pass   # whoever uses the ring next finds it, too
        return 0
