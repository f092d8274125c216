"""Containers, and modules of features alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypedDict

import torch

from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.joined import in_inference, norm_and_relu
from sparseconv.interop.spconv.pytorch.tracing import leaf, proxy_among, recorded
from sparseconv.nn.capturing.region import register_layers
from sparseconv.nn.normalization import BatchNorm
from sparseconv.torch_private import BatchNormBase, surely

#: what norms and activations take
EITHER = "a SparseConvTensor or features"


class Placement(TypedDict, total=False):
    """Where and as what a layer's parameters are made."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class SparseModule(torch.nn.Module):
    """Modules that derive from it are given the whole `SparseConvTensor` by `SparseSequential`."""

    #: whether it is one of the convolutions
    is_convolution = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class SparseSequential(SparseModule):
    """Modules one after another; plain torch modules are applied to the features.

    Takes modules, one OrderedDict of them, or keywords. Empty tensors pass through every module, so that channels are
    those of the network; batch norms leave them as they are.

    >>> net = SparseSequential(torch.nn.Linear(4, 8), act=torch.nn.ReLU())
    >>> len(net), net[-1]
    (2, ReLU())
    """

    def __init__(self, *args: Any, **kwargs: torch.nn.Module) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            named = dict(args[0])
        else:
            named = {str(i): module for i, module in enumerate(args)}
        for name, module in (*named.items(), *kwargs.items()):
            if name in self._modules:
                raise ValueError(f"two modules have the name {name!r}")
            self.add_module(name, module)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} modules")
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: torch.nn.Module, name: str | None = None) -> None:
        """Append a module."""
        name = str(len(self._modules)) if name is None else name
        if name in self._modules:
            raise KeyError(f"there is a module {name!r} already")
        self.add_module(name, module)

    def forward(self, input):  # no annotations: torch.fx cannot pickle a graph with one that is text
        modules = [module for module in self._modules.values() if module is not None]
        if isinstance(input, SparseConvTensor) or proxy_among(input) is None:
            return in_turn(input, modules)
        for whole, run in groupby(modules, is_spconv_module):
            together = tuple(run)
            if whole:
                for module in together:
                    input = module(input)
            else:
                input = in_turn(input, together)
        return input


def in_turn(input: Any, modules: Sequence[Any]) -> Any:
    """Modules one after another on a `SparseConvTensor`, plain ones on its features; on anything else, on that.

    Where `torch.fx` traces it is one node, since only the tensor itself tells whether it is sparse.
    """
    if not isinstance(input, SparseConvTensor) and (node := recorded(in_turn, (input, modules))) is not None:
        return node
    at, padded = 0, [*modules, None, None]
    while at < len(modules):
        module, following, third = padded[at : at + 3]
        input, taken = _first(module, following, third, input)
        at += taken
    return input


class SparseBatchNorm(BatchNorm):
    """Batch norm over all voxels; takes a `SparseConvTensor` or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input) if isinstance(input, torch.Tensor) else leaf(self, input, takes=EITHER)


class SparseSyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch norm over the voxels of all processes; takes a `SparseConvTensor` or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input) if isinstance(input, torch.Tensor) else leaf(self, input, takes=EITHER)


class SparseReLU(torch.nn.ReLU):
    """ReLU; takes a `SparseConvTensor` or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input) if isinstance(input, torch.Tensor) else leaf(self, input, takes=EITHER)


class SparseIdentity(torch.nn.Identity):
    """Returns its input."""


register_layers(SparseModule, SparseBatchNorm, SparseSyncBatchNorm, SparseReLU)


def _first(module: Any, following: Any, third: Any, input: Any) -> tuple[Any, int]:
    """The first of three modules applied to a tensor, and how many of them that took: some run as one."""
    if not isinstance(input, SparseConvTensor):
        return module(input), 1
    if is_spconv_module(module):
        joined = in_inference(module, following, third) if is_sparse_conv(module) and module.joins else None
        if joined is None:
            return module(input), 1
        return module.convolved(input, joined), 2 if joined.epilogue is None else 3
    if type(module) is torch.nn.BatchNorm1d and (y := norm_and_relu(module, following, input)) is not None:
        return input.replace_feature(y), 2
    if isinstance(module, BatchNormBase) and module.training and surely(input.features.shape[0] == 0):
        return input, 1
    return input.replace_feature(module(input.features)), 1


def is_spconv_module(module: torch.nn.Module | None) -> bool:
    """Whether a module takes the whole `SparseConvTensor`."""
    return isinstance(module, (SparseModule, SparseBatchNorm, SparseSyncBatchNorm, SparseReLU, SparseIdentity))


def is_sparse_conv(module: torch.nn.Module) -> bool:
    """Whether a module is one of the convolutions."""
    return isinstance(module, SparseModule) and module.is_convolution


def assign_name_for_sparse_modules(module: torch.nn.Module) -> None:
    """Tell every `SparseModule` its path in the network."""
    for path, child in module.named_modules():
        if isinstance(child, SparseModule):
            child._sparse_unique_name = path
