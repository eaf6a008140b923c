"""Front ends: processes that speak HTTP and gRPC for one engine (--frontends N).

The problem: one trio thread takes 20 to 30 us for a small request, most of them for sockets, HTTP and gRPC, so one core is
all that a server uses of its machine however many models it has. Several whole servers on one port would hold every model
several times, split batches and break sequences. The choice: the transports, which decide nothing, run in
processes of their own, and everything that decides stays where it was, in one process and on one thread: the engine.

    front end (N processes)                       engine (one process)
    sockets, TLS, HTTP, gRPC, compression
    bytes -> request            -- descriptor -->  admission, schedulers, batches, statistics, traces
    response -> bytes           <-- descriptor --  completions
    any other verb              --- message ---->  the engine's own app and handlers
                                <-- message -----

A front end runs the very transports that the engine runs without this flag. They are given an admission that sends
requests to the engine (cext/frontend/front_side) instead of queueing them. The engine's end (cext/frontend/engine_side)
makes requests of what comes and admits them like any other, so batches, sequences, priorities, the cache and statistics
are exact whichever front end a request came through. Tensors lie in memory that both map (cext/frontend/channel).

What is not an infer request (control verbs, generate, health, reflection) is not understood in the front end at all: its
bytes go to the engine over a socket (frames), which answers them with the same app and handlers as its own ports would
(verbs). There is one implementation of each verb.

Rules:
 1. A front end is expendable. Its end takes its own connections along and nothing else: the engine cancels its requests,
    gives its memory back and starts another.
 2. The engine believes nothing that a front end writes (rule 2 of cext/rings/channel). One that writes what cannot be is killed.
 3. A front end that loses the engine ends at once; the kernel makes sure of it (PR_SET_PDEATHSIG).
 4. Front ends are forked from a template (template), which was started afresh: it has no threads and none of the
    engine's sockets.
 5. What a front end knows of models is a copy that may be late. So it never refuses a request because of it.
"""
