"""What the descriptors on the rings between the server and a model's process mean, and their messages.

A message is `size` bytes of its own part, written by a MessageWriter, and its tensors' bytes behind it, from the
next multiple of ALIGN; `length` bytes in all, at `offset` of the shared memory. An offset with OWN set
is the number of a segment that was made for this message alone and whose descriptor went over the socket.
One of up to KEEP_ABOVE bytes is copied before its descriptor is passed; a longer one, and one with OWN, is lent until RETURN.

  batch          u32 requests, then per request
                 u32 flags, u32 inputs, u64 timeout, u64 or text correlation, text id,
                 [u64 its trace's id, u64 that one's parent, [text trace context]], [text parameters as JSON],
                 [u32 names, u32 of them that are only state, texts], inputs as tensors
  tensor         text name, u32 datatype, u32 dimensions, u64 each, u32 place, u64 offset, u64 bytes
  answer         u32 how (see Answer); a response: text parameters, u32 outputs, tensors;
                 an error: text parameters, text message, u32 code
  result         u64 four times (began, inputs made, executed, outputs made), u32 whole,
                 whole = 1: text; else u32 answers, answers; whole = 2: of the first requests that have none, which
                 were executed together, and another result of the batch follows; with STATED_TOO: stated, behind the answers
  send           u32 flags (FINAL, NULL), u64 bytes it counts, answer unless NULL
  call           u32 flags, text model, u64 version + 1 or text label, text id, u64 timeout,
                 u64 or text correlation, u64 parent request, u64 batch, [u64 priority], text parameters, u32 names, texts,
                 u32 inputs, tensors
  call response  u32 flags (FINAL, NULL, TIMES_TOO), [u64 seven times, u64 version + 1], answer unless NULL
  sequence end   u32 is text, u64 or text correlation, text reason
  stated         u32 requests, then u64 id, u32 how (SUCCEEDED, FAILED, LATER, RELEASED), for the first two u64 four times;
                 u32 executions, then u64 the batch's number, u64 size, u64 four times
  activity       u64 nanoseconds, text name
  report         u32 outcome (see Reported), u64 nanoseconds of its computation, u64 of its output

This is the list: cext/rings/kinds.pxd is made of it (tools/gen_kinds.py), and a test compares the two.
"""

from __future__ import annotations

# enum Kind
# to the model's process, on the ring of its main thread
BATCH = 1  # id: the batch's number
ANSWER = 2  # a call response for the main thread, which waits for it; id: the call's key
SEQUENCE_END = 3
LOOK = 4  # a message for the main thread has come over the socket
# to the model's process, on the ring of its second thread
CANCEL = 8  # id: the request's; length: 1 where its responses are still read
ACKNOWLEDGE = 9  # id: the request's; length: bytes that were passed on
CALL_RESPONSE = 10  # id: the call's key
# to the server
RESULT = 16  # id: the batch's number
SEND = 17  # id: the request's
CALL = 18  # id: the call's key
TOOK = 19  # id: the call's key
CALL_CANCEL = 20  # id: the call's key; length: 1 where its responses are not read any more
DROPPED = 21  # id: the request's
REPORT = 22  # the durations of a response, as the model reports them; id: its place among the responses of its request
STATED = 23  # the statistics of requests and executions, as the model reports them
ACTIVITY = 25  # of a request's trace, as the model reports it; id: the request's
# both ways, and between the engine and a front end
RETURN = 24  # offset: of a message of the other side that nobody looks at any more

# enum Answer
RESPONSE = 0
ERROR = 1
OPEN = 2  # a sender answers it
RESCHEDULED = 3

# enum Reported
SUCCEEDED = 0
FAILED = 1
EMPTY = 2
CANCELLED = 3
LATER = 4  # of a request that is answered: a report may still come
RELEASED = 5  # of one of which that was said: none comes

# enum Place
HERE = 0  # offset counts from where the message's tensors begin
# offset counts from the start of the shared memory: of an input, in the area of received bodies; of an output, in the
# batch that is answered
GIVEN = 1
LENT = 2  # in the process's part of the shared memory, from its start

# enum Flag
START = 1
END = 2
TRACED = 4
TEXT_ID = 8  # the correlation id is a text
PARAMETERS = 16
NAMES = 32
CONTEXT = 64
DECOUPLED = 128
BLOCKING = 256
PARENT = 512
LABELLED = 1024  # the version is a text
PRIORITY = 2048
TIMED = 4096  # the last response to a call says when it was where: from REQUEST_START to REQUEST_END
FINAL = 1
NULL_RESPONSE = 2
STATED_TOO = 4  # of a result's `whole`
TIMES_TOO = 8  # of a call response

# enum
KEEP_ABOVE = 16384  # bytes: a longer message is lent; no smaller tensor is named where it lies
REQUEST_BITS = 20  # a request's id is its batch's number and so many bits of its place in it

TOP = 1 << 63  # of an offset: it is a segment's number
