"""Installs the wheel in dist/ into an empty environment, with no compiler in sight, and serves models from there.

Usage: python tools/wheel_test.py [WHEEL or SOURCE DISTRIBUTION]

On Linux the server must use the libnghttp2 that came with the wheel, not one that this machine has. A source
distribution is built by pip, for which it may use this machine's compiler and libraries; the server then runs without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [2]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [2]})
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy() * 2)])
            for r in requests
        ]
"""


def request(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=30) as answer:
        return json.load(answer)


def without_compiler(binaries: Path) -> dict[str, str]:
    """The environment of a process that finds nothing but the environment's own programs."""
    return {**os.environ, "PATH": str(binaries)}


def own_nghttp2(pid: int, folder: Path) -> None:
    """Exits unless the process has loaded libnghttp2 from the environment in `folder`, and from nowhere else."""
    loaded = set(re.findall(r"\S*libnghttp2\S*", Path(f"/proc/{pid}/maps").read_text()))
    if not loaded or any(not path.startswith(str(folder)) for path in loaded):
        sys.exit(f"expected libnghttp2 of the wheel below {folder}, loaded: {sorted(loaded) or 'none'}")


def serve(neptrio: Path, folder: Path, own_library: bool) -> None:
    """Runs the installed command on one Python model and asks it something."""
    (folder / "models" / "double" / "1").mkdir(parents=True)
    (folder / "models" / "double" / "1" / "model.py").write_text(MODEL)
    body = {"inputs": [{"name": "X", "datatype": "INT32", "shape": [2], "data": [3, 4]}]}
    flags = [
        f"--model-repository={folder / 'models'}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
    ]
    answer(neptrio, folder, flags, "double", body, [6, 8], own_library)


def demo(neptrio: Path, folder: Path, own_library: bool) -> None:
    """Asks a model that came with the wheel."""
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}]}
    answer(neptrio, folder, ["demo"], "upper_case", body, ["HELLO"], own_library)


def answer(
    neptrio: Path, folder: Path, flags: list[str], model: str, body: dict, expected: list, own_library: bool
) -> None:
    """Runs the installed command and exits unless that model's first output is `expected`."""
    log = folder / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [neptrio, *flags, "--http-port=0", "--grpc-port=0", "--metrics-port=0"],
            stderr=stderr,
            cwd=folder,
            env=without_compiler(neptrio.parent),
        )
    try:
        deadline = time.monotonic() + 60
        while "\nserving\n" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the installed server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        address = log.read_text().split("REST     on ")[1].split()[0]
        got = request(f"{address}/v2/models/{model}/infer", body)
        if got["outputs"][0]["data"] != expected:
            sys.exit(f"wrong answer: {got}")
        console(log.read_text().split("console  on ")[1].split()[0])
        if own_library:
            own_nghttp2(server.pid, folder)
        server.terminate()
        if server.wait(30) != 0:
            sys.exit(f"the installed server ended with {server.returncode}")
        print(log.read_text(), end="")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def console(url: str) -> None:
    """Exits unless the console's page and every file that it names come from `url`."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        page = answer.read().decode()
    names = re.findall(r'(?:href|src)="/console/([^"]+)"', page)
    if "main.js" not in names:
        sys.exit(f"the installed console has no page: {page[:200]}")
    for name in names:
        with urllib.request.urlopen(f"{url}/{name}", timeout=30) as answer:
            answer.read()


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("neptrio-*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else wheels[-1]
    built_here = wheel.name.endswith(".tar.gz")
    own_library = sys.platform == "linux" and not built_here
    if not built_here:
        bill = json.loads(wheel.with_name(f"{wheel.stem}.cdx.json").read_text())
        if sys.platform == "linux" and "libnghttp2" not in {part["name"] for part in bill["components"]}:
            sys.exit("the bill of materials does not name libnghttp2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        binaries = folder / "venv" / "bin"
        pip = [binaries / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        tools = None if built_here else without_compiler(binaries)
        subprocess.run([*pip, wheel], check=True, cwd=folder, env=tools)
        check = "import triton_python_backend_utils as u, neptrio, pathlib as p; [print(p.Path(m.__file__).with_name('py.typed').stat().st_size) for m in (u, neptrio)]"
        subprocess.run([binaries / "python", "-c", check], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        subprocess.run([binaries / "neptrio", "--version"], check=True, cwd=folder)
        serve(binaries / "neptrio", folder, own_library)
        demo(binaries / "neptrio", folder, own_library)
    print(f"{wheel.name} installs and serves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
