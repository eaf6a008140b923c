"""The compiled half of a Triton server's triton_python_backend_utils, which models import by this name, too."""

from triton_python_backend_utils._compiled_names import *  # noqa: F403
from triton_python_backend_utils._compiled_names import __all__ as __all__
