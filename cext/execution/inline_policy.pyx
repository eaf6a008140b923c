"""Which executions belong on the trio thread: those whose running mean is below INLINE_NS.

The problem: an execution that is preempted now and then takes milliseconds. With a plain mean a fast model would then
stay on its thread for dozens of executions, each several times as expensive as on the loop. But a model that has
become slow must leave the loop soon, because it stops everybody. The choice: each execution counts for a tenth of
the mean, and for at most CLIP_NS.

In numbers: one preempted execution does not move a model of up to 11 us; it costs one of 15 us six executions on its
thread (a quarter of a millisecond in all). A model that has become slow leaves the loop after at most three slow
executions. A model that is slow one time in five leaves the loop too, however fast it is the other times.
"""


def mean(double before, int64_t took) -> float:
    """mean_after() for Python, used by tests."""
    return mean_after(before, took)


LIMIT = float(INLINE_NS)  # type: float
