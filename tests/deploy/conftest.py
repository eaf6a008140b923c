"""These tests need the packages of the extra `deploy` (`make test-deploy` installs them); without them they are not run."""

from __future__ import annotations

import importlib.util

NEEDED = ("helm_python", "kubernetes_validate")
# the modules import them, so that without them they cannot even be collected
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]
