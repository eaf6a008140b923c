"""Where the fields of a configuration stand."""

from __future__ import annotations

import gc

from neptrio.config.locate import lines_of_json


def test_lines_of_json() -> None:
    found = lines_of_json('{\n"input": [\n{"dataType": "x"},\n{"dims": [1,\n2]}]}')
    assert found["input",] == 2 and found["input", 0] == 3 and found["input", 0, "data_type"] == 3
    assert found["input", 1, "dims"] == 4 and found["input", 1, "dims", 1] == 5


def test_lines_of_json_leave_nothing_to_the_collector() -> None:
    """The document is as long as its client likes."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        lines_of_json('{"input": [1, {"a": 2}')
        gc.collect()
        assert not [one for one in gc.garbage if getattr(one, "__module__", "") == "neptrio.config.locate"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
