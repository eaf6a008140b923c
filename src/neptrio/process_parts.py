"""What backends have in this process that the floors below them have to know: the GPUs that models use, and what is to be done,
or asked, before the process ends.

Backends are imported when the first model needs them, and nobody below may import them. So they say here what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

gpus: dict[int, Any] = {}  # those that models use, by their ordinal: backends.kernel.device.Device
settle: list[Callable[[], None]] = []  # each waits until GPUs have back what regions and models held
hang: list[Callable[[], bool]] = []  # each says whether something hangs on a GPU, or is not released
kill: list[Callable[[], None]] = []  # each ends processes of models
