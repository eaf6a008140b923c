"""DLPack capsules, over host memory: numpy is the other side. Device memory is in kernel/test_device_tensors.py."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.errors import InvalidArgument
from neptrio.request import dlpack
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from triton_python_backend_utils._dlpack import Capsule


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?"])
def test_both_ways(kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    capsule = dlpack.export(from_numpy("X", array))
    assert dlpack.device_of(capsule) == (1, 0)
    seen = np.from_dlpack(Capsule(capsule))
    assert seen.dtype == array.dtype and np.array_equal(seen, array)
    taken = dlpack.take("Y", array.__dlpack__())
    assert (taken.name, taken.shape, taken.nbytes) == ("Y", (2, 3), array.nbytes)
    assert taken.address == array.ctypes.data, "not a copy"
    assert np.array_equal(to_numpy(taken), array)


def test_memory_lives_as_long_as_someone_uses_it() -> None:
    array = np.arange(4)
    before = sys.getrefcount(array)
    taken = dlpack.take("Y", array.__dlpack__())
    assert sys.getrefcount(array) > before
    del taken
    assert sys.getrefcount(array) == before
    tensor = from_numpy("X", np.arange(4))
    before = sys.getrefcount(tensor)
    seen = np.from_dlpack(Capsule(dlpack.export(tensor)))
    assert sys.getrefcount(tensor) == before + 1
    del seen
    assert sys.getrefcount(tensor) == before
    dlpack.export(tensor)  # nobody takes it
    assert sys.getrefcount(tensor) == before


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3, 0, 4), (0,)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    """numpy gives them strides of 0, others those of a tensor with elements."""
    taken = dlpack.take("Y", np.zeros(shape, np.float32).__dlpack__())
    assert (taken.shape, taken.nbytes) == (shape, 0)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tensor 'X' holds strings, which DLPack cannot express"):
        dlpack.export(Tensor("X", 13, (1,), b"\0\0\0\0"))
    with pytest.raises(InvalidArgument, match="tensor 'Y' is not contiguous"):
        dlpack.take("Y", np.zeros((3, 4))[:, ::2].__dlpack__())
    with pytest.raises(InvalidArgument, match=r"DLPack type 5 with 64 bits and 1 lanes has no datatype"):
        dlpack.take("Y", np.zeros(3, np.complex64).__dlpack__())
    capsule = np.zeros(3).__dlpack__()
    dlpack.take("Y", capsule)
    with pytest.raises(InvalidArgument, match="expected a DLPack capsule that has not been consumed"):
        dlpack.take("Y", capsule)


def test_a_model_s_bfloat16_tensors_go_both_ways() -> None:
    array = np.array([[1.5, -2], [0, 3e38]], ml_dtypes.bfloat16)
    theirs = utils.Tensor("X", array)
    capsule = theirs.to_dlpack()
    taken = dlpack.take("Y", capsule)
    assert (taken.dtype, taken.shape, taken.address) == (14, (2, 2), array.ctypes.data)
    for source in (Capsule(dlpack.export(taken)), dlpack.export(taken), theirs):
        back = utils.Tensor.from_dlpack("Z", source)
        assert back.triton_dtype() == 14 and back.as_numpy().tobytes() == array.tobytes()
        assert back.as_numpy().ctypes.data == array.ctypes.data, "not a copy"
    with pytest.raises(utils.TritonModelException, match="cannot take tensor 'C' through DLPack"):
        utils.Tensor.from_dlpack("C", np.zeros((2, 2), np.longdouble))
