"""The protocol's datatypes: wire names, numbers, numpy types (docs/protocol/features.md B3)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# number (as in model_config.proto) -> (protocol name, config enum name, numpy dtype)
TABLE: dict[int, tuple[str, str, np.dtype]] = {
    1: ("BOOL", "TYPE_BOOL", np.dtype(np.bool_)),
    2: ("UINT8", "TYPE_UINT8", np.dtype(np.uint8)),
    3: ("UINT16", "TYPE_UINT16", np.dtype("<u2")),
    4: ("UINT32", "TYPE_UINT32", np.dtype("<u4")),
    5: ("UINT64", "TYPE_UINT64", np.dtype("<u8")),
    6: ("INT8", "TYPE_INT8", np.dtype(np.int8)),
    7: ("INT16", "TYPE_INT16", np.dtype("<i2")),
    8: ("INT32", "TYPE_INT32", np.dtype("<i4")),
    9: ("INT64", "TYPE_INT64", np.dtype("<i8")),
    10: ("FP16", "TYPE_FP16", np.dtype("<f2")),
    11: ("FP32", "TYPE_FP32", np.dtype("<f4")),
    12: ("FP64", "TYPE_FP64", np.dtype("<f8")),
    13: ("BYTES", "TYPE_STRING", np.dtype(object)),
    14: ("BF16", "TYPE_BF16", np.dtype(ml_dtypes.bfloat16)),
}

BYTES = 13
FP16 = 10
BF16 = 14

NAME = {number: row[0] for number, row in TABLE.items()}
CONFIG_NAME = {number: row[1] for number, row in TABLE.items()}
NUMPY = {number: row[2] for number, row in TABLE.items()}
NUMBER = {row[0]: number for number, row in TABLE.items()}
FROM_CONFIG_NAME = {row[1]: number for number, row in TABLE.items()}
ITEM_SIZE = {number: 0 if number == BYTES else row[2].itemsize for number, row in TABLE.items()}
# what numpy, C and the files of a model call them, without regard to case
_ALSO = {
    "BOOLEAN": "BOOL", "INT": "INT32", "INTEGER": "INT32", "LONG": "INT64",
    "HALF": "FP16", "FLOAT16": "FP16", "BFLOAT16": "BF16", "FLOAT": "FP32", "FLOAT32": "FP32", "SINGLE": "FP32",
    "DOUBLE": "FP64", "FLOAT64": "FP64", "STRING": "BYTES", "STR": "BYTES", "OBJECT": "BYTES",
}  # fmt: skip


def meant_by(word: str) -> int:
    """The datatype that was surely meant by another name, of a configuration or of a request; 0 when it is none."""
    bare = word.strip("\"'").upper().removeprefix("TYPE_")
    return NUMBER.get(_ALSO.get(bare, bare), 0)


def from_numpy(dtype: np.dtype) -> int:
    """The datatype number of a numpy dtype; bytes and str arrays are BYTES. 0 when there is none."""
    if dtype.kind in "OSU":
        return BYTES
    if dtype.kind == "b":
        return 1
    for number, row in TABLE.items():
        if number != BYTES and row[2] == dtype:
            return number
    return 0
