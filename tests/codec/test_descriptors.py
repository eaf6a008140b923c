"""Message classes are one per name, whichever threads ask for them first."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading
from neptrio.codec import descriptors
barrier = threading.Barrier(16)
found = []
def ask():
    barrier.wait()
    found.append(descriptors.message_class("inference.ModelConfig"))
threads = [threading.Thread(target=ask) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
print(len({id(c) for c in found}), len(found))
"""


def test_threads_that_meet_get_the_same_class() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "16"], done.stderr
