"""Names of datatypes as configurations have them, without their TYPE_: those that have numpy arrays of their own."""

TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING",
)  # fmt: skip
