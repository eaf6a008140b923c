"""What the backend `pytorch` costs beside the module alone, a hand-written Python model, and the same sums in ONNX.

    make test-backends                     # once: makes build/backends-environment
    build/backends-environment/bin/python -m benchmarks.pytorch_cost

Every server adds and subtracts the same two tensors. One client asks, so a request's time is what a caller waits for; with 32
clients the CPU time of all processes of a server, per request, says what it costs. All have the same core in the same rounds,
the generator has another, and medians of the rounds are shown. "over the module" is that less a call of the module in a process
of its own, so it holds the network, the protocol, the queue, and the way to the model's process and back.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import models, peers, run

MODULE = """
import torch

class Sums(torch.nn.Module):
    def forward(self, INPUT0, INPUT1):
        return INPUT0 + INPUT1, INPUT0 - INPUT1
"""
EXPORT = """
batch = torch.export.Dim("batch", min=1, max=8)
example = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
torch.export.save(torch.export.export(Sums().eval(), example, dynamic_shapes=({0: batch}, {0: batch})), sys.argv[1])
"""
BARE = """
import sys, time
import torch
torch.set_num_threads(1)
module = torch.export.load(sys.argv[1]).module()
tensors = torch.arange(16, dtype=torch.int32).reshape(1, 16), torch.ones(1, 16, dtype=torch.int32)
with torch.inference_mode():
    for _ in range(500):
        module(*tensors)
    begin, count = time.perf_counter(), 2000
    for _ in range(count):
        module(*tensors)
print((time.perf_counter() - begin) / count)
"""
BY_HAND = (
    "import os\nimport triton_python_backend_utils as pb_utils\n"
    + MODULE
    + """
class TritonPythonModel:
    def initialize(self, args):
        torch.set_num_threads(1)
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.module = torch.export.load(os.path.join(folder, "model.pt2")).module()

    @torch.inference_mode()
    def execute(self, requests):
        responses = []
        for request in requests:
            given = (pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT0", "INPUT1"))
            made = self.module(*(torch.from_dlpack(tensor.to_dlpack()) for tensor in given))
            outputs = [pb_utils.Tensor(f"OUTPUT{i}", tensor.numpy()) for i, tensor in enumerate(made)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
)
THREAD = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }\n'


def written(folder: Path, backend: str, model: str = "") -> Path:
    """A repository of the model with that backend; returns the exported module's file."""
    config = f'backend: "{backend}"\nmax_batch_size: 8\n{models.SIMPLE_IO}{models.ONE_INSTANCE}'
    models.written(folder, "simple", config + (THREAD if backend == "pytorch" else ""), model)
    path = folder / "simple" / "1" / "model.pt2"
    subprocess.run([sys.executable, "-c", f"import sys\n{MODULE}{EXPORT}", path], check=True)
    return path


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-cpu", type=int, default=0)
    parser.add_argument("--cpu", type=int, default=1)
    options = parser.parse_args()
    run.build_loadgen()
    cases = [run.Case("HTTP binary", "binary", "simple", 1), run.Case("HTTP binary", "binary", "simple", 32)]
    bare: list[float] = []
    waits: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = written(folder / "pytorch", "pytorch")
        written(folder / "by hand", "python", BY_HAND)
        models.onnx_repository(folder / "ONNX")
        servers = []
        try:
            for kind in ("pytorch", "by hand", "ONNX"):
                servers.append(peers.neptrio(folder / kind, options.server_cpu, folder / f"{kind}.log", kind))
            for _ in range(options.rounds):
                pinned = ["taskset", "-c", str(options.server_cpu), sys.executable, "-c", BARE, str(path)]
                bare.append(float(subprocess.run(pinned, capture_output=True, check=True).stdout) * 1e6)
                for server in servers:
                    one, many = (run.load(case, server, folder, 1.0, options.cpu) for case in cases)
                    waits.setdefault(server.name, []).append(one["p50_us"])
                    busy.setdefault(server.name, []).append(many["server_cpu_us"])
        finally:
            for server in servers:
                server.stop()
    alone = statistics.median(bare)
    print(f"A call of the module alone: {alone:.1f} us.\n")
    print(
        "| served by | a request, one client | over the module | CPU time of a request, 32 clients | over the module |"
    )
    print("|---|---|---|---|---|")
    for kind, times in waits.items():
        wait, cost = statistics.median(times), statistics.median(busy[kind])
        print(f"| {kind} | {wait:.0f} us | {wait - alone:.0f} us | {cost:.0f} us | {cost - alone:.0f} us |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
