"""Replaces the real NVRTC by the fake one, in processes that use the fake driver."""

import sys
from importlib.util import spec_from_file_location
from pathlib import Path


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cuda.bindings.nvrtc":
            return spec_from_file_location(name, Path(__file__).parent / "fake_nvrtc.py")
        return None


sys.meta_path.insert(0, _Finder())
