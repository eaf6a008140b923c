"""Settings for the whole suite.

Generated examples are the same in every run, so that a change is judged by its own effect;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # some tests import ONNX Runtime themselves

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
# whether a failure is found is all that tools/mutants.py asks
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
