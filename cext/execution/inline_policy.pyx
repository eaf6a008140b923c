"""Which executions belong on the trio thread: those whose running mean is below INLINE_NS.

The problem: an execution is sometimes preempted and then takes milliseconds. A plain mean would then
keep a fast model on its thread for dozens of executions, where each costs several times what it
would on the loop. But an execution that has become slow must leave the loop soon: it
stops everybody. The choice: each execution counts for a tenth, and for CLIP_NS at most.

What follows, in numbers: one preempted execution costs a model of up to 11 us nothing, one of 15 us six
executions on its thread (a quarter of a millisecond in all); one that has become slow leaves the loop
after three slow executions at most. A model that is slow once in five times leaves the loop too, however
fast it is the other times.
"""


def mean(double before, int64_t took) -> float:
    """mean_after(), for tests."""
    return mean_after(before, took)


LIMIT = float(INLINE_NS)
