"""CompiledCache: a response cache of Triton's interface, libtritoncache_NAME.so, in a process of its own.

The problem: such a library is foreign machine code, perhaps with a network behind it: it may be slow, hang, crash, or give what
it was never given. The choice: a process of its own (cache_process.py), which is asked without waiting. What does not come in
time, or cannot be believed, is a miss.

Rules:
 1. The trio thread decides and never blocks. It sends lookups, which are small; the writer thread sends what is to be stored, and
    lookups when the socket is busy. The supervisor thread starts processes, takes their answers to pieces, and posts them to
    the trio thread.
 2. A lookup is answered within timeout_ms, whatever the process does. While an answer is overdue nothing is asked: it is a miss
    at once, so that a cache that hangs costs each request that time once and not again and again. An answer that nobody waits
    for any more is overdue like others: else clients that give up sooner would hide that the cache hangs.
 3. A process that owes an answer for restart_ms is killed, and nobody waits for it any more. One that has ended is started
    again after a pause, which doubles up to MAX_PAUSE seconds.
 4. Questions, their bytes, and answers that wait for the trio thread are bounded.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from neptrio.backends.compiled import cache_process, find, host, packed_answer
from neptrio.backends.compiled.cache_process import CacheProcess, Message, Violation
from neptrio.errors import Unavailable, Unsupported
from neptrio.foreign import text_of
from neptrio.loop import threads
from neptrio.loop.mailbox import CompletionQueue, WorkItem
from neptrio.loop.timers import Timer, Timers
from neptrio.request.infer_request import Tensor, monotonic_ns
from neptrio.scheduling.cache_config import CacheConfig
from neptrio.scheduling.cache_elsewhere import CacheElsewhere
from neptrio.scheduling.response_cache import CacheStatistics
from neptrio.settings import Settings
from triton_python_backend_utils._errors import TritonModelException

log = logging.getLogger("neptrio.cache")

FIRST_PAUSE, MAX_PAUSE = 0.1, 30.0
STEADY_SECONDS = 60.0  # after a process lived this long, the next pause is the first again
END_SECONDS = 2.0  # for a process that has closed its socket
MOST_OPEN = 256  # questions under way
MOST_STORING = 64 << 20  # bytes of answers that are being stored
LARGE = 1 << 20  # of one that is found: the next is received when the trio thread has this one
HANDED_SECONDS = 10.0
COMPLAINT_NS = 10_000_000_000  # between two lines about answers that cannot be used


@dataclass(frozen=True)
class UnderWay:
    """What the process has of questions."""

    pid: int | None  # None: there is none that can be asked
    questions: int
    overdue: int
    storing_bytes: int


class _Told(WorkItem):
    """Something to be done on the trio thread."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.done = threading.Event()

    def deliver(self) -> None:
        try:
            self.function()
        finally:
            self.done.set()


class _Asked:
    """A question that the process has."""

    __slots__ = ("answered", "at_ns", "key", "number", "overdue", "size")

    def __init__(
        self, number: int, key: bytes, size: int, answered: Callable[[list[Tensor] | None], None] | None
    ) -> None:
        self.number = number
        self.key = key
        self.size = size  # of what is to be stored; 0 for a lookup
        self.answered = answered  # None when nobody waits
        self.at_ns = monotonic_ns()
        self.overdue = False

    @property
    def can_be_overdue(self) -> bool:
        """Whether it is a lookup that may become overdue; nobody waits for what is stored."""
        return not self.size and not self.overdue

    def forget(self) -> None:
        """Nobody waits any more."""
        self.answered = None

    def answer(self, found: list[Tensor] | None) -> None:
        """Tells who waits, once."""
        answered, self.answered = self.answered, None
        if answered is not None:
            answered(found)


def compiled_cache(
    config: CacheConfig, settings: Settings, timers: Timers, completions: CompletionQueue
) -> CompiledCache:
    """The cache whose library the settings lead to. Raises InvalidArgument, or Unsupported."""
    library = find.cache(config.name, settings).absolute()
    try:
        abi = host.library_path()
    except TritonModelException as error:
        raise Unsupported(f"--cache-config={config.name}: {text_of(error)}") from None
    return CompiledCache(config, library, abi, timers, completions)


class CompiledCache(CacheElsewhere):
    """The cache of one server."""

    def __init__(
        self, config: CacheConfig, library: Path, abi: str, timers: Timers, completions: CompletionQueue
    ) -> None:
        """`abi` is the library that exports the interface. begin() starts the process."""
        super().__init__(config.coalesce)
        self.config = config
        self.library = library
        self._abi = abi
        self._timers = timers
        self._completions = completions
        self._timeout_ns = config.timeout_ms * 1_000_000
        self._restart_ns = max(config.restart_ms, config.timeout_ms) * 1_000_000
        self._run = secrets.token_hex(16)
        shared = config.namespace.encode()
        self._secret = blake2b(shared).digest()[:32] if shared else secrets.token_bytes(32)
        # of the trio thread
        self._numbers = itertools.count(1)
        self._process: CacheProcess | None = None  # the one that can be asked
        self._asked: dict[
            int, _Asked
        ] = {}  # in the order in which they were asked; the supervisor looks things up
        self._overdue = 0
        self._storing = 0
        self._timer: Timer | None = None
        self._complained_ns = -COMPLAINT_NS
        # of the threads
        self._gauges = (0.0, 0.0, 0.0)
        self._work: queue.SimpleQueue[tuple[CacheProcess, _Asked, bytearray | None] | None]
        self._work = queue.SimpleQueue()
        self._first: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._current: CacheProcess | None = None
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------ any thread but trio's

    def begin(self) -> None:
        """Starts the process and waits until the library is ready. Raises Unavailable; after NoThread it goes on."""
        for name, target in (("cache-writer", self._write), ("cache-supervisor", self._live))[
            len(self._threads) :
        ]:
            self._threads.append(threads.start(target, name=name))
        why = self._first.get()
        if why:
            raise Unavailable(f"cache '{self.config.name}' ({self.library}) cannot be used: {why}")

    def close(self) -> None:
        """Ends the process and the threads. Harmless when begin() was not called, or has failed."""
        with self._lock:
            self._closing.set()
            process = self._current
        if process is not None:
            process.finish()
            if not process.begun:  # it does not listen yet
                process.kill("the server ends")
        self._work.put(None)
        for thread in reversed(self._threads):
            thread.join(cache_process.FINISH_SECONDS)
            if process is not None:
                process.kill("it did not end in time")
            thread.join(cache_process.FINISH_SECONDS)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            process, asked, block = work
            kind = cache_process.LOOKUP if block is None else cache_process.INSERT
            try:
                if block is not None:
                    packed_answer.seal(block, asked.key, self._secret)
                process.send(kind, asked.number, asked.key.hex().encode(), block)
            except OSError:
                pass  # it has ended, which the supervisor notices
            del work, process, asked, block  # which may be large

    def _live(self) -> None:
        """Starts one process after the other."""
        name, pause, first = self.config.name, FIRST_PAUSE, True
        while not self._closing.is_set():
            began = time.monotonic()
            begun, why = self._serve_once()
            if self._closing.is_set() or (first and not begun):
                break
            first = False
            pause = FIRST_PAUSE if time.monotonic() - began >= STEADY_SECONDS else pause
            log.error("cache '%s' has ended: %s; it is started again in %g s", name, why, pause)
            self._closing.wait(pause)
            pause = min(2 * pause, MAX_PAUSE)
        else:
            why = "the server ends"
        if first:
            self._first.put(why or "its process has ended")

    def _serve_once(self) -> tuple[bool, str]:
        """One process from its start to its end: whether the library was ready, and why it ended."""
        why = ""
        try:
            process = CacheProcess(self.config.name, self._abi, self.library, self.config.settings)
        except (OSError, threads.NoThread) as error:
            return False, f"its process could not be started: {text_of(error)}"
        with self._lock:
            self._current = process
            if self._closing.is_set():
                process.kill("the server ends")
        try:
            for message in process.answers():
                if message.kind == cache_process.BEGUN and message.code != cache_process.FINE:
                    why = message.value.decode("utf-8", "replace")
                    break  # whether it ends by itself or not
                elif message.kind == cache_process.BEGUN:
                    if process.begun:
                        raise Violation("it has begun twice")
                    process.begun = True
                    self._post(lambda: self._ready(process))
                    self._first.put("")
                elif message.kind == cache_process.ANSWERED:
                    self._took(process, message)
                elif message.kind == cache_process.NUMBERS:
                    self._take_gauges(message.value)
        except Violation as error:
            process.kill(str(error))
        finally:
            self._gauges = 0.0, 0.0, 0.0  # the next process begins with nothing, and tells only changes
            self._post(lambda: self._ended(process))
        with self._lock:
            self._current = None
        ended = process.end(END_SECONDS)
        return process.begun, why or ended

    def _post(self, function: Callable[[], None], wait: bool = False) -> None:
        told = _Told(function)
        self._completions.post(told)
        if wait:
            told.done.wait(HANDED_SECONDS)

    def _take_gauges(self, value: bytearray) -> None:
        if len(value) != cache_process.GAUGES.size:
            raise Violation("it has sent gauges of another size")
        entries, evictions, share = cache_process.GAUGES.unpack(value)
        if all(math.isfinite(number) and 0 <= number < 1e15 for number in (entries, evictions, share)):
            self._gauges = entries, evictions, min(share, 1.0)

    def _took(self, process: CacheProcess, message: Message) -> None:
        asked = self._asked.get(message.number)
        found: list[Tensor] | None = None
        why = ""
        if message.code != cache_process.FINE:
            if message.code not in (cache_process.NOT_FOUND, cache_process.ALREADY_EXISTS):
                why = message.value.decode("utf-8", "replace") or "it has failed and does not say why"
        elif asked is not None and not asked.size:
            try:
                found = packed_answer.unpack(message.value, asked.key, self._secret)
            except packed_answer.Unusable as error:
                why = f"what it has found cannot be used: {error}"
        self._post(lambda: self._answered(process, message.number, found, why), len(message.value) > LARGE)

    # ------------------------------------------------------------ the trio thread

    def scope(self, version: str, load: int) -> str:
        """With a namespace, the same for all servers of it and all loads."""
        namespace = self.config.namespace
        return f"{len(namespace)}:{namespace}/{version}" if namespace else f"{self._run}/{version}/{load}"

    def ask(self, key: bytes, answered: Callable[[list[Tensor] | None], None]) -> _Asked | None:
        """See CacheElsewhere."""
        self._lookups += 1
        return self._put(key, answered, None)

    def insert(self, key: bytes, outputs: list[Tensor]) -> bool:
        """Has copies of `outputs` stored, where there is room for them on the way. False: spent() is told later."""
        size = packed_answer.packed_bytes(outputs)
        if (
            outputs
            and size <= cache_process.MOST_BYTES
            and self._storing + size <= MOST_STORING
            and self._can_be_asked
        ):
            self._put(key, None, packed_answer.packed(outputs))
        return False

    @property
    def _can_be_asked(self) -> bool:
        return self._process is not None and not self._overdue and len(self._asked) < MOST_OPEN

    def _put(
        self, key: bytes, answered: Callable[[list[Tensor] | None], None] | None, block: bytearray | None
    ) -> _Asked | None:
        process = self._process
        if process is None or not self._can_be_asked:
            return None
        asked = _Asked(next(self._numbers), key, 0 if block is None else len(block), answered)
        self._storing += asked.size
        self._asked[asked.number] = asked
        process.open.add(asked.number)
        if block is not None or not process.send_now(asked.number, asked.key.hex().encode()):
            self._work.put((process, asked, block))
        self._look_at(asked.at_ns + (self._restart_ns if answered is None else self._timeout_ns))
        return asked

    def _look_at(self, when_ns: int) -> None:
        """Has _look() called then, or before."""
        timer = self._timer
        if timer is not None and timer.when_ns <= when_ns:
            return
        if timer is not None:
            timer.cancel()
        self._timer = self._timers.at(when_ns, self._look)

    def _look(self) -> None:
        self._timer = None
        now, late, hangs = monotonic_ns(), [], False
        for asked in self._asked.values():
            age = now - asked.at_ns
            hangs = hangs or age >= self._restart_ns
            if age < self._timeout_ns:
                break
            if asked.can_be_overdue:
                late.append(asked)
        for asked in late:
            asked.overdue = True
        self._overdue += len(late)
        for asked in late:  # whoever is answered may come back, and is not asked for then (rule 2)
            asked.answer(None)
        if hangs:
            process = self._process
            if process is not None:
                process.kill(f"it did not answer within {self._restart_ns / 1e9:g} s")
                self._ended(process)  # which may take it seconds
            return
        for asked in self._asked.values():
            self._look_at(asked.at_ns + self._restart_ns)
            if asked.can_be_overdue:
                self._look_at(asked.at_ns + self._timeout_ns)
                break

    def _answered(self, process: CacheProcess, number: int, found: list[Tensor] | None, why: str) -> None:
        if process is not self._process:
            return
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        self._overdue -= asked.overdue
        self._storing -= asked.size
        if asked.size:
            self.spent(0, monotonic_ns() - asked.at_ns)
        if why:
            self._complain(why)
        asked.answer(found)

    def _complain(self, why: str) -> None:
        now = monotonic_ns()
        if now - self._complained_ns >= COMPLAINT_NS:
            self._complained_ns = now
            log.warning("cache '%s': %s", self.config.name, why)

    def _ready(self, process: CacheProcess) -> None:
        self._process = process
        log.info("cache '%s' is ready (%s, process %d)", self.config.name, self.library, process.pid)

    def _ended(self, process: CacheProcess) -> None:
        if process is not self._process:
            return
        self._process = None
        left, self._asked = self._asked, {}
        self._overdue = self._storing = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for asked in left.values():
            asked.answer(None)

    def used(self) -> None:
        """See CacheElsewhere."""
        self._hits += 1

    def refused(self, why: str) -> None:
        """See CacheElsewhere."""
        self._complain(f"what it has found cannot be used: {why}")

    def under_way(self) -> UnderWay:
        """The current numbers."""
        pid = None if self._process is None else self._process.pid
        return UnderWay(pid, len(self._asked), self._overdue, self._storing)

    def statistics(self) -> CacheStatistics:
        """The current numbers; those that only the library knows are as it reports them, 0 where it does not."""
        entries, evictions, share = self._gauges
        size = self.config.settings.get("size", "")
        total = int(size) if size.isascii() and size.isdigit() and len(size) < 16 else 0
        return CacheStatistics(
            entries=int(entries),
            used_bytes=round(share * total),
            total_bytes=total,
            lookups=self._lookups,
            hits=self._hits,
            misses=self._lookups - self._hits,
            evictions=int(evictions),
            lookup_ns=self._lookup_ns,
            insertion_ns=self._insertion_ns,
        )
