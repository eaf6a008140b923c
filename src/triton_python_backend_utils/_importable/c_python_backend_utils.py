"""The names of the compiled half, for models and workers in an environment that has this package not (_process/modules.py)."""

from triton_python_backend_utils._compiled_names import *  # noqa: F403
