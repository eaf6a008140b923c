"""The servers under test: how each is installed, started, pinned, found ready and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import tritonserver as triton
from benchmarks.tritonserver import PEERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "tritonserver": ["nvidia-pytriton==0.7.0"],
    "mlserver": ["mlserver>=1.6"],
    "kserve": ["kserve>=0.13"],
}


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Server:
    """A started server. `forms` are the wire forms it speaks; `ready_s` is its start-up time."""

    name: str
    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    forms: tuple[str, ...] = ("json", "binary", "unary", "stream", "sequence")
    ready_s: float = 0.0
    ready_cpu_s: float = 0.0  # CPU time until then
    idle_rss: int = 0  # bytes, before any load
    pids: list[int] = field(default_factory=list)
    metrics_port: int = 0
    trace_file: Path | None = None

    def tree(self) -> list[int]:
        """The server's process and everything below it."""
        found = [self.process.pid]
        for pid in found:
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(c) for c in (task / "children").read_text().split()]
            except OSError:
                continue
        return found

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree."""
        total = 0
        for pid in self.tree():
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                continue
        return total

    def cpu_seconds(self) -> float:
        """CPU time of the whole tree so far."""
        ticks = 0
        for pid in self.tree():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
            except OSError:
                continue
        return ticks / os.sysconf("SC_CLK_TCK")

    def held_up(self) -> tuple[float, int]:
        """(ms that threads of the tree could run and had no core, times they were preempted) so far."""
        waited, preempted = 0.0, 0
        for pid in self.tree():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    waited += int((task / "schedstat").read_text().split()[1]) / 1e6
                    status = (task / "status").read_text()
                except OSError:
                    continue
                preempted += int(status.split("nonvoluntary_ctxt_switches:")[1].split()[0])
        return waited, preempted

    def real_time(self, on: bool) -> None:
        """Puts every thread of the tree before all ordinary processes, or back. Raises PermissionError."""
        policy, priority = (os.SCHED_FIFO, 20) if on else (os.SCHED_OTHER, 0)
        for pid in self.tree():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))
                except ProcessLookupError:
                    continue

    def settle(self, limit_s: float = 10) -> None:
        """Waits until the server, ready and without load, uses no CPU time for a quarter of a second."""
        end, used = time.monotonic() + limit_s, -1.0
        while used != (used := self.cpu_seconds()) and time.monotonic() < end:
            time.sleep(0.25)

    def stop(self) -> None:
        """Ends the server and its children."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _start(
    name: str, command: list[str], env: dict[str, str], cpu: int | None, log: Path
) -> subprocess.Popen[bytes]:
    pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
    env = {"PYTHONDONTWRITEBYTECODE": "", **env}  # installed packages have their bytecode beside them
    with log.open("wb") as out:
        return subprocess.Popen(
            pin + command, env={**os.environ, **env}, stdout=out, stderr=out, start_new_session=True
        )


def _wait_ready(server: Server, path: str, log: Path, limit_s: float = 120) -> Server:
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    server.ready_s = time.monotonic() - begin
                    server.ready_cpu_s = server.cpu_seconds()
                    return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    server.stop()
    raise RuntimeError(f"{server.name} was not ready within {limit_s} s")


def neptrio(
    repository: Path, cpu: int | None, log: Path, name: str = "neptrio", flags: tuple[str, ...] = ()
) -> Server:
    """This server."""
    http, grpc = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "neptrio",
        f"--model-repository={repository}",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        *flags,
    ]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    process = _start(name, command, {"PYTHONPATH": path}, cpu, log)
    return _wait_ready(Server(name, process, http, grpc), "/v2/health/ready", log)


def tritonserver(
    repository: Path, cpu: int | None, log: Path, flags: tuple[str, ...] = (), backends: Path | None = None
) -> Server:
    """NVIDIA's C++ server with its Python backend (benchmarks/tritonserver.py), or with those in `backends`."""
    site = triton.home()
    if site is None:
        raise RuntimeError("tritonserver is not installed: `make bench-peers` does it")
    if backends is None:
        backends = PEERS / "triton-backends"
        if not (backends / "python").exists():
            triton.lay_out(site, backends)
    http, grpc = free_port(), free_port()
    command = triton.command(site, backends, repository, http, grpc, "--allow-metrics=false", *flags)
    process = _start("tritonserver", command, triton.environment(site), cpu, log)
    return _wait_ready(Server("tritonserver", process, http, grpc), "/v2/health/ready", log)


def mlserver(folder: Path, cpu: int | None, log: Path) -> Server:
    """MLServer with a custom runtime that adds and subtracts."""
    http, grpc = free_port(), free_port()
    model = folder / "simple"
    model.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(
        f'{{"debug": false, "parallel_workers": 0, "host": "127.0.0.1", "http_port": {http}, '
        f'"grpc_port": {grpc}, "metrics_port": {free_port()}}}'
    )
    (model / "model-settings.json").write_text(
        '{"name": "simple", "implementation": "runtime.AddSub", "parameters": {"version": "1"}}'
    )
    (folder / "runtime.py").write_text(MLSERVER_RUNTIME)
    binary = PEERS / "mlserver" / "bin" / "mlserver"
    process = _start("mlserver", [str(binary), "start", str(folder)], {"PYTHONPATH": str(folder)}, cpu, log)
    server = Server("mlserver", process, http, grpc, forms=("json", "unary"))
    return _wait_ready(server, "/v2/models/simple/ready", log)


MLSERVER_RUNTIME = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class AddSub(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        a, b = (NumpyCodec.decode_input(t) for t in payload.inputs)
        return InferenceResponse(
            model_name=self.name,
            outputs=[NumpyCodec.encode_output("OUTPUT0", a + b), NumpyCodec.encode_output("OUTPUT1", a - b)],
        )
"""


def kserve(folder: Path, cpu: int | None, log: Path) -> Server:
    """KServe's Python server with a custom model."""
    http, grpc = free_port(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve.py").write_text(KSERVE_MODEL)
    quiet = {
        name: {"level": "WARNING"} for name in ("kserve", "kserve.trace", "uvicorn.access", "uvicorn.error")
    }
    config = {"version": 1, "disable_existing_loggers": False, "loggers": quiet}
    (folder / "log.json").write_text(json.dumps(config))  # a line per call would be measured too
    python = PEERS / "kserve" / "bin" / "python"
    command = [
        str(python),
        str(folder / "serve.py"),
        "--http_port",
        str(http),
        "--grpc_port",
        str(grpc),
        "--log_config_file",
        str(folder / "log.json"),
    ]
    process = _start("kserve", command, {}, cpu, log)
    server = Server("kserve", process, http, grpc, forms=("json", "binary", "unary"))
    return _wait_ready(server, "/v2/models/simple/ready", log)


KSERVE_MODEL = """
from kserve import InferOutput, InferResponse, Model, ModelServer

class AddSub(Model):
    def __init__(self):
        super().__init__("simple")
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        a, b = (t.as_numpy() for t in payload.inputs)
        outputs = []
        for name, value in (("OUTPUT0", a + b), ("OUTPUT1", a - b)):
            output = InferOutput(name=name, shape=list(value.shape), datatype="INT32")
            output.set_data_from_numpy(value, binary_data=bool(payload.from_grpc or payload.use_binary_outputs))
            outputs.append(output)
        return InferResponse(
            response_id=payload.id or "",
            model_name="simple",
            infer_outputs=outputs,
            use_binary_outputs=payload.use_binary_outputs,
        )


if __name__ == "__main__":
    ModelServer(workers=1, enable_latency_logging=False).start([AddSub()])
"""


def install() -> None:
    """Makes an environment for each peer under benchmarks/.peers."""
    for name, packages in PACKAGES.items():
        home = PEERS / name
        if (home / ".installed").exists():
            continue
        print(f"installing {name}: {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "-q", *packages], check=True)
        (home / ".installed").touch()


if __name__ == "__main__":
    install()
