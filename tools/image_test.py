"""Builds the container image and runs it as a cluster would: `make test-image`.

    python tools/image_test.py [--python IMAGE] [--keep-base]

Needs root, buildah and bubblewrap; without one of them that is said, and nothing is built (status 0, since the container file is
linted by `make test-deploy`). Without --python, the base is a Debian 12 that debootstrap makes in build/image, because the
usual one comes from a registry that not every machine reaches. It is kept for the next run.

The image's file system is mounted read-only, with memory for /tmp and /dev/shm and nothing else that can be written to, in
namespaces of its own, as the image's user and without capabilities; the command line and variables are the image's. Then:

 1. the health check of the image fails before the server is ready, and not after
 2. REST answers a Python model in a process of its own, and gRPC listens
 3. nothing can be written to the root file system, and the server runs without rights
 4. SIGTERM to the first process ends all of them, and the status is 0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "image"
BASE, IMAGE = "localhost/neptrio-base", "localhost/neptrio-test"
INCLUDE = "python3,python3-venv,python3-dev,ca-certificates"
BUILDAH = [
    "buildah",
    "--storage-driver",
    "vfs",
    "--root",
    str(FOLDER / "store"),
    "--runroot",
    str(FOLDER / "run"),
]
NEEDED = ("buildah", "bwrap")
CONFIG = """
backend: "python" max_batch_size: 4
parameters { key: "isolation" value { string_value: "process" } }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
MODEL = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for place in ("/", "/opt/neptrio", "/models"):
            try:
                open(os.path.join(place, "written"), "w").close()
            except OSError:
                continue
            raise RuntimeError(f"{place} can be written to")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy() * 2)])
            for r in requests
        ]
"""


def run(*command: str | Path, quiet: bool = False) -> str:
    """Runs a command and returns what it prints; exits with its output where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if quiet else None, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def made_base() -> str:
    """A base image of our own."""
    rootfs = FOLDER / "base"
    if not (rootfs / "usr" / "bin" / "python3").exists():
        if shutil.which("debootstrap") is None:
            sys.exit("debootstrap is not installed: give a base image with --python")
        shutil.rmtree(rootfs, ignore_errors=True)
        print("making a base with debootstrap", flush=True)
        run("debootstrap", "--variant=minbase", f"--include={INCLUDE}", "bookworm", rootfs, quiet=True)
    container = run(*BUILDAH, "from", "scratch").strip()
    run(*BUILDAH, "add", container, rootfs, "/", quiet=True)
    run(*BUILDAH, "commit", "--rm", container, BASE, quiet=True)
    return BASE


def built(python: str) -> None:
    """Builds the image. Where this machine's pip is told of certificates or places, so is the image's."""
    volumes = [
        path
        for path in ("/etc/pip.conf", "/etc/ssl/certs", "/usr/share/ca-certificates")
        if Path(path).exists()
    ]
    mounts = [flag for path in volumes for flag in ("--volume", f"{path}:{path}:ro")]
    print("building the image", flush=True)
    run(
        *BUILDAH, "bud", "--format", "docker", "--layers", "--isolation", "chroot", "--network", "host", *mounts, "--build-arg", f"PYTHON={python}",
        "--ignorefile", ROOT / ".dockerignore", "-f", ROOT / "deploy" / "container" / "Containerfile", "-t", IMAGE, ROOT,
        quiet=True,
    )  # fmt: skip


class Contained:
    """The image's first process and what it needs."""

    def __init__(self, rootfs: Path, config: dict, models: Path, log: Path) -> None:
        self.rootfs, self.config, self.log, self.models = rootfs, config, log, models
        uid, gid = config["User"].split(":")
        self._limits = [
            "--ro-bind", str(rootfs), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp",
            "--ro-bind", str(models), "/models", "--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
            "--uid", uid, "--gid", gid, "--cap-drop", "ALL", "--clearenv", "--chdir", config["WorkingDir"], "--die-with-parent",
        ]  # fmt: skip
        for pair in config["Env"]:
            self._limits += ["--setenv", *pair.split("=", 1)]

    def inside(self, command: list[str], *flags: str) -> list[str]:
        """The command line that runs a command under the image's limits."""
        return ["bwrap", *self._limits, *flags, "--", *command]

    def healthy(self) -> bool:
        """What the image's health check says; it has the network of the server."""
        done = subprocess.run(self.inside(self.config["Healthcheck"]["Test"][1:]), capture_output=True)
        return done.returncode == 0


def children(pid: int) -> list[int]:
    """The processes below one, itself not included."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def post(path: str, body: dict) -> dict:
    with urllib.request.urlopen(
        f"http://127.0.0.1:8000{path}", json.dumps(body).encode(), timeout=60
    ) as answer:
        return dict(json.load(answer))


def tried(rootfs: Path, config: dict, folder: Path) -> None:
    """Runs the image and does what the module's text says."""
    models = folder / "models"
    (models / "double" / "1").mkdir(parents=True)
    (models / "double" / "config.pbtxt").write_text(CONFIG)
    (models / "double" / "1" / "model.py").write_text(MODEL)
    os.chmod(folder, 0o755)
    contained = Contained(rootfs, config, models, folder / "log")
    if contained.healthy():
        sys.exit("something answers on port 8000 already, or the health check cannot fail")
    with contained.log.open("wb") as log:
        command = [*config["Entrypoint"], *config["Cmd"]]
        server = subprocess.Popen(contained.inside(command, "--unshare-pid", "--as-pid-1"), stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not contained.healthy():
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not become ready:\n{contained.log.read_text()}")
            time.sleep(0.2)
        answer = post(
            "/v2/models/double/infer",
            {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1, 2], "data": [3, 4]}]},
        )
        if answer["outputs"][0]["data"] != [6, 8]:
            sys.exit(f"wrong answer: {answer}")
        below = children(server.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in below}
        for pid in below:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            if int(status["CapEff"].strip(), 16):
                sys.exit(f"{names[pid]} has capabilities: {status['CapEff'].strip()}")
        first = next(pid for pid in below if names[pid] == "tini")
        print(f"processes: {', '.join(names.values())}")
        os.kill(first, signal.SIGTERM)
        if server.wait(60) != 0:
            sys.exit(f"the server ended with {server.returncode}:\n{contained.log.read_text()}")
        left = [f"{names[pid]} ({pid})" for pid in below if Path(f"/proc/{pid}").exists()]
        if left:
            sys.exit(f"still there after the end: {', '.join(left)}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    print(contained.log.read_text(), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="the base image; without it one is made with debootstrap")
    options = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.getuid() != 0:
        missing.append("root")
    if missing:
        print(f"the image is not built: {', '.join(missing)} is missing")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    built(options.python or made_base())
    container = run(*BUILDAH, "from", IMAGE).strip()
    try:
        rootfs = Path(run(*BUILDAH, "mount", container).strip())
        config = json.loads(run(*BUILDAH, "inspect", "--type", "image", IMAGE))["Docker"]["config"]
        size = sum(path.lstat().st_size for path in rootfs.rglob("*") if not path.is_symlink())
        print(
            f"the image holds {size / 1e6:.0f} MB, of which {own_size(rootfs) / 1e6:.0f} MB are /opt/neptrio"
        )
        with tempfile.TemporaryDirectory() as name:
            tried(rootfs, config, Path(name))
    finally:
        run(*BUILDAH, "rm", container)
    print("the image builds and serves")
    return 0


def own_size(rootfs: Path) -> int:
    """Bytes of what the project brings along."""
    return sum(p.lstat().st_size for p in (rootfs / "opt" / "neptrio").rglob("*") if not p.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
