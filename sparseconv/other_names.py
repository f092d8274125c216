"""Names of spconv, MinkowskiEngine, torchsparse and torch that people try here, and what to use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import torch

Init = TypeVar("Init", bound=Callable[..., None])

#: attributes of their sparse tensors
ATTRIBUTES = {
    "C": "coords",
    "F": "features",
    "batch_size": "grid.batch_size",
    "coordinates": "coords",
    "dense": "to_dense(shape)",
    "feats": "features",
    "indices": "coords",
    "replace_feature": "with_features(features)",
    "spatial_shape": "grid.extent.shape",
}
#: their modules, less Minkowski, Sparse and the number of axes
MODULES = {
    "AvgPooling": "AvgPool",
    "BatchNorm": "BatchNorm",
    "Conv": "Conv",
    "ConvTranspose": "ConvTranspose",
    "Convolution": "Conv",
    "ConvolutionTranspose": "ConvTranspose",
    "InverseConv": "InverseConv",
    "MaxPool": "MaxPool",
    "MaxPooling": "MaxPool",
    "Sequential": "Sequential",
    "SubMConv": "SubmanifoldConv",
}


#: arguments of their layers, and what to do here
ARGUMENTS = {
    "algo": "leave it out, kernels are chosen by the library (backend= names one)",
    "ceil_mode": "leave it out: every voxel that a window reaches is an output",
    "count_include_pad": "AvgPool takes count_absent=",
    "dimension": "use rank=",
    "expand_coordinates": 'Conv takes target="full"',
    "generative": "use sparseconv.nn.ConvTranspose",
    "indice_key": "leave it out, layers share their maps through the grid (InverseConv takes onto= at the call)",
    "kernel_generator": "use taps=, such as sparseconv.interop.hyper_cross_taps(rank, radius)",
    "ndim": "use rank=",
    "output_padding": "ConvTranspose takes target= at the call, the grid to end on",
    "padding_mode": "'zeros' is the default here, and 'circular' is boundary=Boundary.periodic(extent)",
    "return_indices": "MaxPool takes return_winners=True",
    "subm": "use sparseconv.nn.SubmanifoldConv",
    "transposed": "use sparseconv.nn.InverseConv or ConvTranspose",
}


def constructor(init: Init) -> Init:
    """An ``__init__`` that names the class it makes where arguments do not fit, and says what to do."""
    expected = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **named: Any) -> None:
        try:
            expected.bind(self, *args, **named)
        except TypeError as error:
            taken = list(expected.parameters)[1:]
            unknown = next((name for name in named if name not in taken), "")
            near = get_close_matches(unknown, taken, 1)
            advice = ARGUMENTS.get(unknown) or (f"use {near[0]}=" if near else f"it takes {', '.join(taken)}")
            raise TypeError(f"{type(self).__name__} {error}: {advice}") from None
        init(self, *args, **named)

    return cast(Init, checked)


def attribute_error(name: str, advice: str = "") -> AttributeError:
    """That a `SparseTensor` has no such attribute, and what to use."""
    advice = f"use x.{ATTRIBUTES[name]}" if name in ATTRIBUTES else advice
    return AttributeError(f"a sparseconv.SparseTensor has no attribute {name!r}" + (f": {advice}" if advice else ""))


def module_error(name: str) -> AttributeError:
    """That `sparseconv.nn` has no such module, and which one to use."""
    stem = name.removeprefix("Minkowski").removeprefix("Sparse")
    axes = stem[-2] if stem[-1:] in ("d", "D") and stem[-2:-1].isdigit() else ""
    known = MODULES.get(stem[:-2] if axes else stem)
    if known:
        ranked = axes not in ("", "3") and known not in ("BatchNorm", "Sequential")
        advice = f": use sparseconv.nn.{known}" + (f", with rank={axes}" if ranked else "")
        if hasattr(torch.nn, name):
            advice += f"; of dense tensors it is torch.nn.{name}"
    else:
        advice = f": torch's is torch.nn.{name}" if hasattr(torch.nn, name) else ""
    return AttributeError(f"module 'sparseconv.nn' has no attribute {name!r}{advice}")
