"""The access log (--access-log): a line for each request over HTTP and gRPC, when its answer is complete.

The problem: whoever operates a server asks which requests came, from where, for which model, and how they ended. No request
may wait for the disk, and who does not ask for the log may not pay for it. The choice: connections keep None in place of the
log, and compare with that. With the log each request has an AccessRecord, which whatever carries the request fills in and
ends; a thread makes lines of them, some at a time.

Rules:
 1. A request has one line, on whichever way it was answered, refused, or given up by its client. A gRPC stream of inference
    requests has a line for each of those, and one for itself when it ends.
 2. Nobody waits for the file: beyond MOST records that are not written, further ones are left out and counted. Those that the
    disk did not take are, too. The server's log says how many, at most once in TOLD_SECONDS and at the end.
 3. No secret is written: of a target the query is dropped, headers are not shown except User-Agent.
 4. One request is one line: text of clients is cut to LONGEST characters, less where these would take more than ROOM bytes, and
    what could end a line, or control a terminal, is escaped. What waits holds no more than HELD of any text.
 5. With front ends each of them appends to the same file. Lines stay whole: they are written by single calls, to streams of no
    more than PIECE bytes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from json.encoder import encode_basestring_ascii

from neptrio.errors import Code
from neptrio.loop import threads
from neptrio.loop.yielding import yield_cpu
from neptrio.request.infer_request import InferRequest, InferResponse, Timestamp, monotonic_ns
from neptrio.service.line_file import LineFile
from neptrio.settings import Settings

log = logging.getLogger("neptrio.access")

MOST = 16384  # records that wait to be written
GATHER_SECONDS = 0.05
TOGETHER = 32  # lines that are made before the core is offered
PIECE = 4096  # bytes; a pipe takes so many without those of another process in between (PIPE_BUF)
TOLD_SECONDS = 60.0
LONGEST = 300
ROOM = 602  # bytes of such a text as it is written, so that a line is no longer than PIECE
HELD = 2048  # characters of a text that are kept until the line is made, which looks for the model in the whole path
GONE = 499  # the client left before its answer began; the number that web servers use
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_QUEUE_START = int(Timestamp.QUEUE_START)
_COMPUTE_START = int(Timestamp.COMPUTE_START)
_COMPUTE_END = int(Timestamp.COMPUTE_END)
_MODEL = re.compile(r"/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?(?:/|\Z)")
_AGENT = re.compile(rb"\nuser-agent:[ \t]*([^\r\n]*)", re.I)
_UNSAFE = re.compile('[\x00-\x1f"\\\\\x7f-\U0010ffff]')


class AccessRecord:
    """What the log says of one request; end() writes it. Trio thread only."""

    __slots__ = (
        "_began",
        "_ended",
        "_log",
        "agent",
        "bytes_in",
        "bytes_out",
        "client",
        "compute",
        "grpc",
        "id",
        "message",
        "messages",
        "method",
        "model",
        "protocol",
        "queue",
        "status",
        "target",
        "took",
        "version",
        "when",
    )

    def __init__(
        self, access: AccessLog, protocol: str, client: str, method: str, target: str, began: int
    ) -> None:
        """`protocol`: HTTP/1.1 and so on; `began`: when the first byte came, CLOCK_MONOTONIC ns, 0 for now."""
        self._log = access
        self._began = began or monotonic_ns()
        self._ended = False
        self.protocol = protocol
        self.client = client
        self.method = method
        self.target = target
        self.agent = b""
        self.status = 0  # of HTTP, 0: no answer has begun
        self.grpc = ""  # the name of the status of gRPC
        self.bytes_in = self.bytes_out = 0
        self.model = self.version = self.id = ""
        self.queue = self.compute = -1  # ns, -1: not known
        self.message = 0  # which message of a stream it is, 0: none
        self.messages = -1  # requests of a stream, -1: it is none
        self.when = 0.0
        self.took = 0

    def asks(self, request: InferRequest) -> None:
        """It is this inference request."""
        self.id = request.id
        self.model = request.model_name
        model = request.model
        self.version = request.model_version if model is None else model.version

    def answered(self, request: InferRequest, response: InferResponse) -> None:
        """The request has this response, which may not be its last."""
        self.asks(request)
        self.version = response.model_version or self.version
        if response.error is not None and response.error.code is Code.CANCELLED:
            self.status = GONE  # an answer follows, in case that the client has closed its sending side only
        begun = request.timestamp(_COMPUTE_START)
        if begun:
            self.queue = max(0, begun - (request.timestamp(_QUEUE_START) or begun))
            self.compute = max(0, (request.timestamp(_COMPUTE_END) or monotonic_ns()) - begun)

    def answers(self, status: int, size: int = 0) -> None:
        """An answer over HTTP has this status; `size` bytes of its body are sent."""
        self.status = self.status or status
        self.bytes_out += size

    def end(self) -> None:
        """Nothing more is sent. Only the first call counts."""
        if not self._ended:
            self._ended = True
            self.took = monotonic_ns() - self._began
            self.when = time.time() - self.took / 1e9
            asked = len(self.method) + len(self.target) + len(self.model) + len(self.version)
            if asked + len(self.agent) + len(self.id) > HELD:
                self._cut()
            self._log.put(self)

    def _cut(self) -> None:
        self.target = self.target.partition("?")[0][:HELD]
        self.method, self.agent, self.id = self.method[:HELD], self.agent[:HELD], self.id[:HELD]
        self.model, self.version = self.model[:HELD], self.version[:HELD]


def agent_of(head: bytes) -> bytes:
    """The User-Agent of a request of HTTP/1.1, from its head; b"" for none."""
    found = _AGENT.search(head)
    return b"" if found is None else found[1]


class AccessLog:
    """The log. begin(), put(), reopen() and close() are for the server's thread."""

    def __init__(self, form: str, target: str) -> None:
        """`form`: json or combined; `target`: a file's path, stdout or stderr. Raises OSError when it cannot be opened."""
        self._line = _json() if form == "json" else _combined()
        self._file = LineFile(target, 0o640)
        self._piece = PIECE if self._file.shared else 16 * PIECE
        self._records: deque[AccessRecord] = deque()
        self.left_out = 0  # only put() adds to this
        self.lost = 0  # and only the thread to this
        self._told = 0  # of these together
        self._told_at = float("-inf")
        self._failing = False
        self._awake = False  # the thread will look at the records again before it waits
        self._closing = threading.Event()
        self._news = threading.Event()
        self._thread = threads.start(self._run, name="access-writer")

    @classmethod
    def of(cls, settings: Settings) -> AccessLog | None:
        """The log that the settings ask for. Raises OSError."""
        return None if settings.access_log == "off" else cls(settings.access_log, settings.access_log_file)

    def begin(self, protocol: str, client: str, method: str, target: str, began: int = 0) -> AccessRecord:
        """The record of a request."""
        return AccessRecord(self, protocol, client, method, target, began)

    def put(self, record: AccessRecord) -> None:
        """Has a record written (rule 2)."""
        if len(self._records) >= MOST:
            self.left_out += 1
            return
        self._records.append(record)
        if not self._awake:
            self._awake = True
            self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait(TOLD_SECONDS)
            self._closing.wait(GATHER_SECONDS)  # lines come together: few calls, few turns of the thread
            # in this order, so that whatever is set after the look at it wakes the thread again
            self._news.clear()
            self._awake = False
            closing = self._closing.is_set()
            self._write_all()
            self._tell(closing)
            if closing and not self._records:
                return

    def _write_all(self) -> None:
        records = self._records
        lines: list[bytes] = []
        size = 0
        while records:
            line = self._line(records.popleft())
            if size + len(line) > self._piece and lines:
                self._write(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
            if len(lines) % TOGETHER == 0:
                yield_cpu()
        if lines:
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        try:
            self._file.write(b"".join(lines))
            self._failing = False
        except OSError as error:
            self.lost += len(lines)
            if not self._failing:
                log.error("--access-log-file cannot be written: %s", error.strerror)
            self._failing = True

    def _tell(self, now: bool) -> None:
        """Says how many lines are missing, unless that was said a short while ago."""
        missing = self.left_out + self.lost
        if missing > self._told and (now or time.monotonic() - self._told_at > TOLD_SECONDS):
            log.warning(
                "--access-log: %d lines were left out, because they could not be written as fast as requests came",
                missing - self._told,
            )
            self._told = missing
            self._told_at = time.monotonic()

    def reopen(self) -> None:
        """Opens the file again by its name, after it was moved. If that fails, raises OSError and keeps the old one."""
        self._file.reopen()

    def close(self, seconds: float = 1.0) -> None:
        """Waits up to `seconds` for the lines that are not written yet, and ends the thread. The file stays open where that
        still waits for whoever reads it."""
        self._closing.set()
        self._news.set()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._file.close()


def _settle(record: AccessRecord) -> None:
    """Completes what is known of a record: on the thread, because nobody waits there."""
    record.target = record.target.partition("?")[0].partition("#")[0]
    if not record.model:
        found = _MODEL.search(record.target)
        if found is not None and found["model"] != "stats":
            record.model, record.version = found["model"], found["version"] or ""
    record.status = record.status or GONE


def _text(text: str) -> str:
    """Text of a client as JSON."""
    cut = text[:LONGEST]
    shown = encode_basestring_ascii(cut)
    if len(shown) > ROOM:
        shown = encode_basestring_ascii(cut[: ROOM // (12 if max(cut) > "\uffff" else 6)])
    return shown


class _Times:
    """The time of a line as text; lines of the same second share most of it."""

    def __init__(self, form: Callable[[time.struct_time], str]) -> None:
        self._form = form
        self._second = -1
        self._text = ""

    def of(self, when: int) -> str:
        """The text of a second, in UTC."""
        if when != self._second:
            self._second, self._text = when, self._form(time.gmtime(when))
        return self._text


def _json() -> Callable[[AccessRecord], bytes]:
    """What makes a line of JSON of a record; docs/production.md lists the fields. The text is put together by hand, because
    that takes a third of the time."""
    times = _Times(lambda at: time.strftime("%Y-%m-%dT%H:%M:%S", at))

    def line(record: AccessRecord) -> bytes:
        _settle(record)
        second = int(record.when)
        milliseconds = int((record.when - second) * 1000)
        parts = [
            f'{{"time": "{times.of(second)}.{milliseconds:03d}Z", "client": {_text(record.client)}, '
            f'"protocol": {_text("gRPC" if record.grpc else record.protocol)}, '
            f'"method": {_text(record.method)}, "path": {_text(record.target)}, ',
            f'"grpc_status": "{record.grpc}"' if record.grpc else f'"status": {record.status}',
            f', "bytes_in": {record.bytes_in}, "bytes_out": {record.bytes_out}, '
            f'"duration_ms": {record.took / 1e6:.3f}',
        ]
        if record.compute >= 0:
            parts.append(f', "queue_ms": {record.queue / 1e6:.3f}, "compute_ms": {record.compute / 1e6:.3f}')
        if record.id:
            parts.append(f', "request_id": {_text(record.id)}')
        if record.model:
            parts.append(f', "model": {_text(record.model)}')
        if record.version:
            parts.append(f', "model_version": {_text(record.version)}')
        if record.agent:
            parts.append(f', "user_agent": {_text(record.agent[:LONGEST].decode("latin-1"))}')
        if record.message:
            parts.append(f', "message": {record.message}')
        if record.messages >= 0:
            parts.append(f', "messages": {record.messages}')
        parts.append("}\n")
        return "".join(parts).encode()

    return line


def _quoted(text: str) -> str:
    """Text of a client as it stands between quotes of a line."""
    shown = _UNSAFE.sub(_escaped, text[:LONGEST])
    if len(shown) > ROOM:
        shown = _UNSAFE.sub(_escaped, text[: ROOM // 10])
    return shown


def _unquoted(text: str) -> str:
    """The same for text that stands between no quotes."""
    return _quoted(text[: ROOM // 10]).replace(" ", "\\x20") if " " in text else _quoted(text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return '\\"' if character == '"' else character.encode("unicode_escape").decode()


def _combined() -> Callable[[AccessRecord], bytes]:
    """What makes a line of a record in the format that web servers call combined, and behind it what that lacks;
    docs/production.md has the list."""
    times = _Times(
        lambda at: f"{at.tm_mday:02d}/{MONTHS[at.tm_mon - 1]}/{time.strftime('%Y:%H:%M:%S', at)} +0000"
    )

    def line(record: AccessRecord) -> bytes:
        _settle(record)
        agent = record.agent.decode("latin-1")
        return (
            f"{record.client or '-'} - - [{times.of(int(record.when))}] "
            f'"{_quoted(record.method) or "-"} {_quoted(record.target) or "-"} {record.protocol}" '
            f'{record.status} {record.bytes_out} "-" "{_quoted(agent) or "-"}" '
            f'{record.bytes_in} {record.took / 1e9:.6f} "{_quoted(record.id) or "-"}" '
            f'"{_quoted(record.model) or "-"}" {_unquoted(record.version) or "-"} {record.grpc or "-"}\n'
        ).encode()

    return line
