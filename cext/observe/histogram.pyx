"""Log-linear histograms of durations: percentiles with a known relative error.

The problem: an average hides the slow requests, and percentiles cannot be averaged. So what is recorded must be small,
cheap to update (each request does it five times) and mergeable across models, times and servers. The choice: fixed
buckets, 64 of equal width per power of two, like those of HDR histograms; recording takes a count of leading zeros, a
shift and an increment.

Rules:
 1. A bucket holds the integers in (lower, upper]. Every power of two is an upper bound, so cumulative counts at powers
    of two are exact.
 2. Values up to 64 have a bucket each. Above, a bucket's width is at most 1/64 of its lower bound, and percentile()
    returns its middle: the relative error is at most RELATIVE_ERROR = 1/128.
 3. Values of 0 or less are counted in the first bucket. Values above 2**42 are counted in the last one, for which
    percentile() returns the largest value seen.
 4. All histograms have the same buckets, so merging them adds cells and loses nothing.
 5. Cells of a power of two are there from the first value among them on: a model's durations are of a few powers of two, there
    are five histograms of each model, and thousands of models that are put away keep theirs.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

RELATIVE_ERROR = 1.0 / 128  # type: float
LARGEST = <int64_t>1 << <int64_t>MAX_BITS  # type: int


cdef int bucket_of(int64_t value) noexcept nogil:
    cdef uint64_t v
    cdef int shift
    if value <= 1:
        return 0
    v = <uint64_t>(value - 1)
    if v < SUB_BUCKETS:
        return <int>v
    shift = 63 - __builtin_clzll(v) - SUB_BITS
    if shift >= MAX_BITS - SUB_BITS:
        return BUCKETS - 1
    return (shift << SUB_BITS) + <int>(v >> shift)


cdef int64_t lower_of(int index) noexcept nogil:
    """The largest integer below the bucket."""
    cdef int shift
    if index < 2 * SUB_BUCKETS:
        return index
    shift = (index >> SUB_BITS) - 1
    return (<int64_t>(index - (shift << SUB_BITS))) << shift


cdef int64_t upper_of(int index) noexcept nogil:
    """The largest integer in the bucket."""
    return lower_of(index + 1)


cdef uint64_t* row_of(Histogram h, int index) noexcept:
    """The row of a bucket, made if need be; NULL where there is no memory for it."""
    cdef uint64_t* row = h.rows[index >> SUB_BITS]
    if row == NULL:
        row = h.rows[index >> SUB_BITS] = <uint64_t*>calloc(SUB_BUCKETS, sizeof(uint64_t))
    return row


cdef class Histogram:
    """Counts of non-negative integers (nanoseconds, or anything else)."""

    def __dealloc__(self):
        cdef int row
        for row in range(ROWS):
            free(self.rows[row])

    cdef void add(self, int64_t value) noexcept:
        cdef int index
        cdef uint64_t* row
        if value < 0:
            value = 0
        index = bucket_of(value)
        row = self.rows[index >> SUB_BITS]
        if row == NULL:
            self.add_first(index, value)  # a function of its own, so that the usual way needs no stack
            return
        row[index & (SUB_BUCKETS - 1)] += 1
        self.count += 1
        self.sum += <uint64_t>value
        if value > self.max:
            self.max = value

    cdef void add_first(self, int index, int64_t value) noexcept:
        """add() of the first value in its row. Without memory for the row the value is lost."""
        if row_of(self, index) != NULL:
            self.add(value)

    cdef uint64_t at(self, int index) noexcept:
        cdef uint64_t* row = self.rows[index >> SUB_BITS]
        return 0 if row == NULL else row[index & (SUB_BUCKETS - 1)]

    def record(self, int64_t value):
        """Counts one value; negative ones count as 0."""
        self.add(value)

    def clear(self):
        """Removes all values."""
        cdef int row
        for row in range(ROWS):
            if self.rows[row] != NULL:
                memset(self.rows[row], 0, SUB_BUCKETS * sizeof(uint64_t))
        self.count = self.sum = 0
        self.max = 0

    def merge(self, Histogram other not None):
        """Adds all values of `other`; exact. Raises MemoryError, with some of them added."""
        cdef int i, row
        cdef uint64_t* cells
        for row in range(ROWS):
            if other.rows[row] == NULL:
                continue
            cells = row_of(self, row << SUB_BITS)
            if cells == NULL:
                raise MemoryError("histogram")
            for i in range(SUB_BUCKETS):
                cells[i] += other.rows[row][i]
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)

    def percentile(self, double percent):
        # type: (...) -> int
        """The value at or below which `percent` (0 to 100) of all values lie; 0 when there are none.

        It differs by at most RELATIVE_ERROR from the recorded value of that rank. Raises ValueError outside 0..100.
        """
        cdef uint64_t rank, seen = 0
        cdef int i
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile must be between 0 and 100, got {percent:g}")
        if self.count == 0:
            return 0
        # nearest-rank definition: the rank, at least the first
        rank = <uint64_t>(percent / 100 * self.count)
        if rank < percent / 100 * self.count - 1e-9 * self.count:
            rank += 1
        if rank < 1:
            rank = 1
        if rank >= self.count:
            return self.max
        for i in range(BUCKETS):
            seen += self.at(i)
            if seen >= rank:
                break
        if i == BUCKETS - 1:
            return self.max
        return min((lower_of(i) + 1 + upper_of(i)) // 2, self.max)

    def cumulative(self, bounds):
        # type: (Sequence[int]) -> list[int]
        """The number of values at or below each of the ascending `bounds`.

        Exact for powers of two up to 2**42. For another bound, the bucket that contains it is counted only if the
        bound is its upper end.
        """
        cdef int i = 0
        cdef uint64_t seen = 0
        cdef int64_t limit
        found = []
        for bound in bounds:
            limit = bound
            while i < BUCKETS - 1 and upper_of(i) <= limit:
                seen += self.at(i)
                i += 1
            found.append(seen)
        return found

    def buckets(self):
        # type: () -> list[tuple[int, int]]
        """The buckets that are not empty: (upper bound, count), ascending."""
        cdef int i
        return [(upper_of(i), self.at(i)) for i in range(BUCKETS) if self.at(i)]

    @staticmethod
    def from_buckets(pairs):
        # type: (Iterable[tuple[int, int]]) -> Histogram
        """A histogram from the result of buckets(), of this server or another.

        `sum` and `max` are computed from the upper bounds. Raises ValueError for a bound that no bucket has.
        """
        cdef Histogram made = Histogram()
        cdef int i
        cdef int64_t bound
        cdef uint64_t n
        cdef uint64_t* cells
        for upper, number in pairs:
            bound = upper
            n = number
            i = bucket_of(bound)
            if bound < 1 or upper_of(i) != bound:
                raise ValueError(f"{upper} is not the upper bound of a bucket")
            cells = row_of(made, i)
            if cells == NULL:
                raise MemoryError("histogram")
            cells[i & (SUB_BUCKETS - 1)] += n
            made.count += n
            made.sum += <uint64_t>bound * n
            made.max = max(made.max, bound)
        return made


cdef class SlidingHistogram:
    """Percentiles of the last `window_ns` nanoseconds, moving in fifths of it; count and sum of all values.

    This is what a Prometheus summary shows. Time is an argument, nanoseconds of any steady clock.
    """

    def __cinit__(self, int64_t window_ns=60_000_000_000, int slices=5):
        if window_ns < slices or slices < 1:
            raise ValueError("a sliding window needs at least one slice, and a nanosecond for each")
        self.window_ns = window_ns
        self.slices = [Histogram() for _ in range(slices)]

    cdef int advance(self, int64_t now_ns) except -1:
        cdef Py_ssize_t n = len(self.slices)
        cdef int64_t width = self.window_ns // n
        cdef int64_t steps
        if self.slice_end_ns == 0:
            self.slice_end_ns = now_ns + width
            return 0
        if now_ns < self.slice_end_ns:
            return 0
        steps = (now_ns - self.slice_end_ns) // width + 1
        self.slice_end_ns += steps * width
        for _ in range(min(steps, n)):
            self.current = (self.current + 1) % n
            (<Histogram>self.slices[self.current]).clear()
        return 0

    cpdef record(self, int64_t value, int64_t now_ns):
        """Counts a value that was measured at `now_ns`."""
        self.advance(now_ns)
        (<Histogram>self.slices[self.current]).add(value)
        self.count += 1
        if value > 0:
            self.sum += <uint64_t>value

    def window(self, int64_t now_ns):
        # type: (...) -> Histogram
        """A Histogram of the values within the window that ends at `now_ns`."""
        cdef Histogram merged = Histogram()
        self.advance(now_ns)
        for part in self.slices:
            merged.merge(part)
        return merged
