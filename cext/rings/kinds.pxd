# The kinds of triton_python_backend_utils/_process/kinds.py, which says what they mean; made by tools/gen_kinds.py.

cdef enum Kind:
    # to the model's process, on the ring of its main thread
    BATCH = 1            # id: the batch's number
    ANSWER = 2           # a call response for the main thread, which waits for it; id: the call's key
    SEQUENCE_END = 3
    LOOK = 4             # a message for the main thread has come over the socket
    # to the model's process, on the ring of its second thread
    CANCEL = 8           # id: the request's; length: 1 where its responses are still read
    ACKNOWLEDGE = 9      # id: the request's; length: bytes that were passed on
    CALL_RESPONSE = 10   # id: the call's key
    # to the server
    RESULT = 16          # id: the batch's number
    SEND = 17            # id: the request's
    CALL = 18            # id: the call's key
    TOOK = 19            # id: the call's key
    CALL_CANCEL = 20     # id: the call's key; length: 1 where its responses are not read any more
    DROPPED = 21         # id: the request's
    REPORT = 22          # the durations of a response, as the model reports them; id: its place among the responses of its request
    STATED = 23          # the statistics of requests and executions, as the model reports them
    ACTIVITY = 25        # of a request's trace, as the model reports it; id: the request's
    # both ways, and between the engine and a front end
    RETURN = 24          # offset: of a message of the other side that nobody looks at any more

cdef enum Answer:
    RESPONSE = 0
    ERROR = 1
    OPEN = 2             # a sender answers it
    RESCHEDULED = 3

cdef enum Reported:
    SUCCEEDED = 0
    FAILED = 1
    EMPTY = 2
    CANCELLED = 3
    LATER = 4            # of a request that is answered: a report may still come
    RELEASED = 5         # of one of which that was said: none comes

cdef enum Place:
    HERE = 0             # offset counts from where the message's tensors begin
    # offset counts from the start of the shared memory: of an input, in the area of received bodies; of an output, in the
    # batch that is answered
    GIVEN = 1
    LENT = 2             # in the process's part of the shared memory, from its start

cdef enum Flag:
    START = 1
    END = 2
    TRACED = 4
    TEXT_ID = 8          # the correlation id is a text
    PARAMETERS = 16
    NAMES = 32
    CONTEXT = 64
    DECOUPLED = 128
    BLOCKING = 256
    PARENT = 512
    LABELLED = 1024      # the version is a text
    PRIORITY = 2048
    TIMED = 4096         # the last response to a call says when it was where: from REQUEST_START to REQUEST_END
    FINAL = 1
    NULL_RESPONSE = 2
    STATED_TOO = 4       # of a result's `whole`
    TIMES_TOO = 8        # of a call response

cdef enum:
    KEEP_ABOVE = 16384   # bytes: a longer message is lent; no smaller tensor is named where it lies
    REQUEST_BITS = 20    # a request's id is its batch's number and so many bits of its place in it

cdef extern from *:
    """
    #define RING_TOP (1ULL << 63)
    """
    const unsigned long long OWN "RING_TOP"     # in Entry.offset: it is a segment's number
