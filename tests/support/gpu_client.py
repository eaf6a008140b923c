"""A client process with device memory of its own, from the fake driver, for tests of CUDA shared memory regions.

The server can only open memory of another process, so the client must be one: a small interpreter that loads the
fake driver and executes commands from its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.support.gpu import FakeGpu

CODE = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)
assert cuda.cuInit(0) == 0
u64, size = ctypes.c_uint64, ctypes.c_size_t
for line in sys.stdin:
    verb, *rest = json.loads(line)
    if verb == "allocate":
        device, n, at = rest
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        address, handle = u64(), ctypes.create_string_buffer(64)
        call("cuMemAlloc", ctypes.byref(address), size(n))
        address = u64(address.value + at)  # a part of it
        call("cuIpcGetMemHandle", handle, address)
        answer = [address.value, handle.raw.hex()]
    elif verb == "write":
        data = bytes.fromhex(rest[1])
        call("cuMemcpyHtoD", u64(rest[0]), data, size(len(data)))
        answer = None
    elif verb == "read":
        data = ctypes.create_string_buffer(rest[1])
        call("cuMemcpyDtoH", data, u64(rest[0]), size(rest[1]))
        answer = data.raw.hex()
    print(json.dumps(answer), flush=True)
"""


class GpuClient:
    """`region(device, size)` allocates device memory; `write` and `read` copy between it and this process."""

    def __init__(self, gpu: FakeGpu) -> None:
        # the client has counters of its own
        env = {k: v for k, v in gpu.env.items() if k != "FAKE_CUDA_NUMBERS"}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", CODE],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, *words: Any) -> Any:
        import json

        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def region(self, device: int, size: int, at: int = 0) -> tuple[int, bytes]:
        """(address in the client, raw handle) of new device memory, from byte `at` on."""
        address, handle = self._ask("allocate", device, size, at)
        return address, bytes.fromhex(handle)

    def write(self, address: int, data: bytes) -> None:
        """Copies to device memory."""
        self._ask("write", address, data.hex())

    def read(self, address: int, size: int) -> bytes:
        """Copies from device memory."""
        return bytes.fromhex(self._ask("read", address, size))

    def __enter__(self) -> GpuClient:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
