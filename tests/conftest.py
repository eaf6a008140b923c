"""Settings for the whole suite.

Generated examples are the same in every run, so that a change is judged by its own effect;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
