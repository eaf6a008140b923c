"""Whether the instances of an ONNX model on the CPU run one session together.

ONNX Runtime lets any number of threads run a session at the same time. A session holds the weights, packed for the processor, and
making it is nearly all of a load; so a model with two instances, which is Triton's default, takes half of both when they share one.
Where a configuration says what only a session of its own can keep, each instance has its own, as in Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

KEY = "share_session"  # the parameter: 1 or 0
# what a configuration sets to give each instance threads of its own
THREADS = (
    *("intra_op_thread_count", "inter_op_thread_count"),
    *("session.intra_op_num_threads", "session.inter_op_num_threads"),
)
# it holds for the thread that makes the session, not for those that run it
DENORMALS = "session.set_denormal_as_zero"


def obstacle(settings: Mapping[str, str]) -> str:
    """The setting that makes it impossible, "" where there is none."""
    return DENORMALS if settings.get(DENORMALS) == "1" else ""


def shared(settings: Mapping[str, str], own_operators: bool) -> bool:
    """Decides by the model's parameters; only sessions of ONNX Runtime's C library are shared. `own_operators`: the model brings a library of operators, which may count on being run
    by one thread at a time."""
    if obstacle(settings) or settings.get("session_api") == "python":
        return False
    if settings.get(KEY) in ("0", "1"):
        return settings[KEY] == "1"
    return not own_operators and all(settings.get(key, "0") in ("0", "1") for key in THREADS)
