# What the descriptors on the rings between the engine and a front end mean, and their messages.
#
# A message is `size` bytes of its own part, written by a MessageWriter, and its tensors' bytes behind it, from the
# next multiple of ALIGN; `length` bytes in all, at `offset` of the shared memory, in the writer's area.
#
#   request    u32 flags (Flag), text model, text version, text id, u64 receive start, u64 receive end (ns of the
#              monotonic clock, 0 = not taken), u64 timeout in us, u64 priority, u64 or text correlation,
#              [text parameters as JSON], [text address, u64 call], [text owner], [text what headers say of tracing, JSON],
#              [u64 stream], [u32 outputs, per output: text name, u64 classes, u32 in a region,
#              [text region, u64 offset, u64 bytes]], u32 inputs, tensors
#   tensor     text name, u32 datatype, u32 dimensions, u64 each, u32 place,
#              HERE: u64 offset from where the message's tensors begin, u64 bytes;
#              REGION: text region, u64 offset, u64 bytes;
#              RECEIVED: u64 offset of the shared memory, u64 bytes; only in a message that is lent (cext/rings/line),
#              whose RETURN gives those bytes back, too;
#              PASSED: as RECEIVED, in a response: bytes of an input of the same request, which the front end holds
#   response   u32 flags (Flag), text model, text version, text id, text parameters as JSON,
#              [text headers as JSON], [text times as JSON], [u64 queue start, u64 compute start, u64 compute end, ns of
#              the monotonic clock], an error: text message, u32 code, u32 reason, u32 number of a kept answer,
#              text headers as JSON; else u32 outputs, tensors
cdef enum Kind:
    # to the engine
    REQUEST = 1          # id: the request's, which the front end has chosen
    CANCEL = 2           # id: the request's
    ROOM = 3             # id: the request's; length: bytes of responses that its client has room for again
    STREAM_END = 4       # id: the stream's
    # to the front end
    RESPONSE = 16        # id: the request's
    # both ways: RETURN of cext/rings/kinds

cdef enum Flag:
    START = 1
    END = 2
    TEXT_ID = 4          # the correlation id is a text
    PARAMETERS = 8
    OWNER = 16
    ASKED = 32
    STREAM = 64
    OUTPUTS = 128
    EMPTY_FINAL = 256    # the client wants an empty final response
    GRPC = 512           # it came over gRPC, else over HTTP
    ONE_RESPONSE = 1024  # only one response can be carried: a decoupled model is refused
    TIMES = 2048         # the client wants to know the request's own times (observe.timing)
    NO_TIMES = 4096
    CLIENT = 8192        # requests of client addresses are limited: where it came from, and the number of the gRPC
                         # stream that it is a message of, or 0
    FINAL = 1
    NULL_RESPONSE = 2
    ERROR = 4
    HEADERS = 8
    TOLD = 16            # the response tells the request's own times
    STAGES = 32          # when its stages began and ended, for the front end's access log

cdef enum Place:
    HERE = 0
    REGION = 1           # in a region of shared memory that the engine has registered
    RECEIVED = 2         # where the front end has received it, in its memory for bodies
    PASSED = 3           # where an input of the same request was received

cdef enum:
    MOST_OPEN = 1048576  # requests of one front end that are not answered
