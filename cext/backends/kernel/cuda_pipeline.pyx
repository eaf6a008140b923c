# distutils: language = c++
"""Keeps a GPU busy: while one run of a kernel model is awaited, the next ones are launched.

The problem: a GPU idles from the end of one batch until the host has noticed it, answered, and launched the next one,
and while that is copied in. The choice: up to SLOTS runs are under way per instance, so that one computes while the
next is copied to the device and the one before it is copied back. The instance's thread takes batches out of its
mailbox before their turn and asks, between small steps for these, whether the run that it awaits has ended.

    run_device    executes one batch: its turn in the mailbox
    work_off      until all runs of the batch have ended: is the next one done? else advance()
    advance       the next step for the first run that is not launched, of this batch or of those taken after it

Rules:
 1. Runs are launched and awaited in the order of their batches, and of the runs in a batch.
 2. A step gathers at most one chunk of inputs (cuda_launch), so a run that has ended waits for no more than that.
 3. An error of the driver fails its batch, with the error's name, and no further run of it is launched. An event
    behind all that was queued (fence) tells when nothing uses its memory any more; it is awaited in the batch's turn.
    Batches after it go on. An error that breaks the context is noted in the pool, and from then on no batch of any
    instance on that GPU calls the driver.
 4. Nothing waits for ever: a run that takes longer than its limit breaks the context, because no kernel can be stopped
    in any other way than by ending the process. Its time begins when it was launched and the run before it had ended.
 5. Waiting is asking. What a plan took so far says when to ask without pause (expected_end). Otherwise the thread naps, but
    wakes for a batch that arrives while another may be launched.
"""
from libc.stdint cimport int64_t
from libc.string cimport memcpy

cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_launch cimport (
    DeviceBatch,
    DeviceRun,
    DeviceWork,
    advance_run,
    copy_late,
    fence,
)
from neptrio.backends.kernel.cuda_memory cimport Memory, enter, judged, leave, nap, wait_stream
from neptrio.backends.kernel.cuda_queue cimport SLOTS, Queue, Slot
from neptrio.backends.kernel.expected_end cimport expected_after, pause_after, slept_through
from neptrio.backends.kernel.plan cimport Plan
from neptrio.loop.mailbox cimport Mailbox, Work
from neptrio.request.infer_request cimport now_ns

cdef enum:
    PATIENCE = 30           # seconds, where no event tells an end


cdef void begin(DeviceWork* w) noexcept nogil:
    """The batch's first step is due."""
    if not w.begun:
        w.begun = True
        w.times[0] = now_ns()
        w.following = NULL


cdef void failed(DeviceWork* w, int code) noexcept nogil:
    """A step of the next run has failed: it counts as launched, so that its end is awaited (rule 3)."""
    cdef Queue* q = w.queue
    cdef DeviceRun* run = &w.runs[w.launched]
    cdef int r
    w.status = judged(q.memory, code)
    if q.memory.broken:
        return
    run.launched = now_ns()
    w.launched += 1
    r = fence(q, &q.slots[run.slot])
    if r:
        q.memory.broken = r


cdef bint advance(DeviceWork* w, bint ahead) noexcept nogil:
    """One step for the first run of this batch, or of those after it if `ahead`, that is not launched. False when there
    is none or all slots are taken."""
    cdef Queue* q = w.queue
    cdef DeviceRun* run
    cdef Work* taken
    cdef int r
    while w.status or w.launched == w.n_runs:
        if not ahead:
            return False
        if w.following == NULL:
            if q.under_way == SLOTS:
                return False
            taken = (<Mailbox>w.mailbox).take_ahead(run_device, SLOTS - 1)
            if taken == NULL:
                return False
            w.following = &(<DeviceBatch>taken.owner).c
            begin(w.following)
        w = w.following
    run = &w.runs[w.launched]
    if not run.begun and q.under_way == SLOTS:
        return False
    r = advance_run(w, run)
    if r:
        failed(w, r)
    return True


cdef int end(DeviceWork* w) noexcept nogil:
    """The run that was awaited has ended: takes its results and its times. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef DeviceRun* run = &w.runs[w.finished]
    cdef Plan* plan = run.plan
    cdef Slot* s = &q.slots[run.slot]
    cdef float ms = 0
    cdef double took
    cdef int r = 0
    cdef int64_t now = now_ns()
    cdef bint asleep = q.asleep
    q.asleep = False
    took = <double>(now - max(run.launched, q.finished))
    q.finished = now
    w.finished += 1
    q.under_way -= 1
    if w.status:
        return 0
    plan.wait_ns = expected_after(plan.wait_ns, took, asleep)
    if run.small and plan.output_bytes:
        memcpy(run.output, s.pinned + plan.input_bytes, plan.output_bytes)
    if run.late:
        r = copy_late(w, run, s)
    if run.timed and r == 0:
        if cu.cuEventElapsedTime(&ms, s.begin, s.staged) == 0:
            plan.input_ms = ms
        if cu.cuEventElapsedTime(&ms, s.started, s.ran) == 0:
            plan.infer_ms = ms
        if cu.cuEventElapsedTime(&ms, s.ran, s.ended) == 0:
            plan.output_ms = ms
    w.input_ms += plan.input_ms
    w.infer_ms += plan.infer_ms
    w.output_ms += plan.output_ms
    return r


cdef void rest(DeviceWork* w, bint ahead) noexcept nogil:
    """Nothing can be done but to wait: takes a nap, if it is not too short, and gives a run that hangs up (rule 4)."""
    cdef Queue* q = w.queue
    cdef DeviceRun* run = &w.runs[w.finished]
    cdef int64_t waited = now_ns() - max(run.launched, q.finished), expected = <int64_t>run.plan.wait_ns, pause
    if q.limit_ns and waited > q.limit_ns:
        w.late = True
        q.memory.broken = cu.CUDA_ERROR_LAUNCH_TIMEOUT
        return
    if q.busy_wait:
        return
    pause = pause_after(waited, expected)
    q.asleep = slept_through(waited, expected)
    if pause and ahead and q.under_way < SLOTS:
        (<Mailbox>w.mailbox).nap(pause)
    elif pause:
        nap(pause)


cdef void work_off(DeviceWork* w, bint ahead) noexcept nogil:
    """Executes a batch to its end; `ahead`: and begins with those that wait in the mailbox."""
    cdef Queue* q = w.queue
    cdef Memory* memory = q.memory
    cdef int r
    while not memory.broken and (w.finished < w.launched or (w.launched < w.n_runs and not w.status)):
        if w.finished < w.launched:
            r = cu.cuEventQuery(q.slots[w.runs[w.finished].slot].done)
            if r != cu.CUDA_ERROR_NOT_READY:
                if r:
                    w.status = judged(memory, r)
                    if memory.broken:
                        break
                    r = settle(q)  # no event tells the end
                    if r:
                        memory.broken = r
                r = end(w)
                if r:
                    w.status = judged(memory, r)
                elif w.status == 0:
                    judged(memory, 0)
                continue
            q.asleep = False
        if not advance(w, ahead):
            rest(w, ahead)
    if memory.broken and w.status == 0 and w.finished < w.n_runs:
        w.status = memory.broken
        w.doing = "executing"


cdef int settle(Queue* q) noexcept nogil:
    """Waits for all that was queued in any stream. Returns a CUresult."""
    cdef int r = wait_stream(q.memory, q.inward, PATIENCE)
    if r == 0:
        r = wait_stream(q.memory, q.compute, PATIENCE)
    return r or wait_stream(q.memory, q.outward, PATIENCE)


cdef void run_device(Work* work) noexcept nogil:
    """A batch's turn in its mailbox."""
    cdef DeviceWork* w = &(<DeviceBatch>work.owner).c
    cdef Memory* memory = w.queue.memory
    cdef cu.CUstreamCaptureMode mode
    cdef int r = memory.broken
    begin(w)
    if r == 0:
        r = enter(memory, &mode)
        if r:
            w.status = judged(memory, r)
    work_off(w, True)
    if r == 0:
        leave(mode)
    w.times[3] = now_ns()
    w.times[2] = w.times[3] - <int64_t>(w.output_ms * 1e6)
    w.times[1] = w.times[2] - <int64_t>(w.infer_ms * 1e6)
    if w.times[1] < w.times[0]:  # times of events and of the host's clock may differ by some microseconds
        w.times[1] = w.times[0]
    if w.times[2] < w.times[1]:
        w.times[2] = w.times[1]
