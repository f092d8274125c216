"""Coordinates that the names of other libraries make or are given: past 32 bits they are refused, and do not wrap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.interop.minkowski as ME
import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn
from sparseconv.interop.arguments import floor_to_int32
from sparseconv.interop.minkowski.utils import batched_coordinates, sparse_quantize
from sparseconv.interop.torchsparse.conventions import set_version
from sparseconv.interop.torchsparse.utils import collate, quantize

FAR = 3.0e9
ONE = torch.ones(1, 1)


def at(*columns, dtype=torch.float64):
    return torch.tensor([columns], dtype=dtype)


def on_multiples(function):
    """With coordinates as versions 1.4 and 2.0 of torchsparse have them: multiples of the stride."""
    set_version("2.0")
    try:
        return function()
    finally:
        set_version("2.1")


def grown():
    """Voxels near the end of 32 bits, on which a layer that makes finer ones is asked for their positions."""
    x = ME.SparseTensor(ONE, torch.IntTensor([[0, 2**31 - 8]]), tensor_stride=8)
    return ME.MinkowskiGenerativeConvolutionTranspose(1, 1, kernel_size=16, stride=1, dimension=1)(x).C


WRAPPING = {
    "a float tensor": lambda: ME.SparseTensor(ONE, at(0, FAR)),
    "a tensor of 64-bit integers": lambda: ME.SparseTensor(ONE, at(0, FAR, dtype=torch.int64)),
    "a field and its voxels": lambda: ME.TensorField(ONE, at(0, FAR)).sparse(),
    "points that are splatted": lambda: ME.TensorField(ONE, at(0, -FAR)).splat(),
    "voxels that a kernel reaches": grown,
    "a batch": lambda: batched_coordinates([at(FAR)]),
    "a batch of 64-bit integers": lambda: batched_coordinates([at(FAR, dtype=torch.int64)]),
    "cells": lambda: sparse_quantize(at(1.0), quantization_size=1e-10),
    "cells of 64-bit integers": lambda: sparse_quantize(at(FAR, dtype=torch.int64)),
    "torchsparse: cells": lambda: quantize.sparse_quantize(np.array([[FAR, 0, 0]])),
    "torchsparse: a batch": lambda: collate.sparse_collate(
        [torchsparse.SparseTensor(ONE, np.array([[2**31, 0, 0]], np.int64))]
    ),
    "torchsparse: coordinates": lambda: torchsparse.SparseTensor(ONE, at(0, FAR, 0, 0, dtype=torch.int64)).grid,
    "torchsparse: finer voxels": lambda: spnn.Conv3d(1, 1, 2, stride=4, transposed=True, generative=True)(
        torchsparse.SparseTensor(ONE, torch.IntTensor([[0, 2**30, 0, 0]]), stride=4)
    ),
    "torchsparse: multiples of a stride": lambda: on_multiples(
        lambda: torchsparse.SparseTensor(ONE, at(FAR, 0, 0, 0, dtype=torch.int64)).grid
    ),
}


@pytest.mark.parametrize("what", WRAPPING)
def test_it_is_refused(what):
    with pytest.raises(ValueError, match="32 bits"):
        WRAPPING[what]()


NOT_FINITE = {
    "a tensor": lambda value: ME.SparseTensor(ONE, at(0, value)),
    "a field": lambda value: ME.TensorField(ONE, at(0, value)).sparse(),
    "a batch": lambda value: batched_coordinates([at(value)]),
    "cells": lambda value: sparse_quantize(at(value)),
    "torchsparse: cells": lambda value: quantize.sparse_quantize(np.array([[value, 0, 0]])),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("what", NOT_FINITE)
def test_what_is_not_finite_is_refused(what, value):
    with pytest.raises(ValueError, match="finite"):
        NOT_FINITE[what](value)


def test_what_just_fits_is_right():
    ends = torch.tensor([[-(2**31), 2**31 - 1]])
    for dtype in (torch.int64, torch.float64):
        assert floor_to_int32("coords", ends.to(dtype)).tolist() == ends.tolist()
    assert floor_to_int32("coords", torch.tensor([-0.5, 2.5])).tolist() == [-1, 2]
    assert floor_to_int32("coords", torch.zeros(0, 3)).shape == (0, 3)
    half = torch.tensor([1.5, -1.5], dtype=torch.float16)
    assert floor_to_int32("coords", half).tolist() == [1, -2]
