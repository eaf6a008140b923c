"""When a thread that waits for a GPU asks whether a run has ended, and what it learns from the answer.

The problem: asking without pause costs a core, and sleeping costs time, since a sleep ends 50 us late and more. The choice: what
a plan took so far says when its next run will end. Until shortly before that the thread sleeps, then it asks without
pause.

Rules:
 1. A run that is expected to take longer than LONG_NS is slept through until a quarter of that, AROUND_NS at most, before its end.
 2. Around the expected end, and in the first DROWSY_NS, there is no pause. Later there are naps that grow with what has passed.
 3. Each run counts for an eighth of what is expected.
 4. But a run that had ended when the thread woke took no more than the sleep, and nobody knows how much less. Were the
    sleep counted as its time, all quick runs after a slow one (the first, in which memory is page-locked) would be slept
    through: each for 3 % less, down to a sleep that its own lateness keeps that long. So four fifths of the sleep are
    expected of the next one. Less (a half) would be learned sooner, but costs runs of 0.2 to 0.4 ms that vary by a tenth
    twice as much, since the thread naps behind what was expected too short.
"""


def pause(int64_t waited, int64_t expected) -> int:
    """pause_after() for Python, used by tests."""
    return pause_after(waited, expected)


def expectation(double expected, double took, bint asleep) -> float:
    """expected_after() for Python, used by tests."""
    return expected_after(expected, took, asleep)


def asleep(int64_t waited, int64_t expected) -> bool:
    """slept_through() for Python, used by tests."""
    return slept_through(waited, expected)


LONG = int(LONG_NS)  # type: int
