"""The package itself, for workers that a model's pool starts in an environment that has it not (_process/modules.py)."""

import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SPEC = importlib.util.spec_from_file_location(
    __name__, os.path.join(_FOLDER, "__init__.py"), submodule_search_locations=[_FOLDER]
)
assert _SPEC is not None and _SPEC.loader is not None
# an import gives what is in sys.modules when the module's code has run
sys.modules[__name__] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[__name__])
