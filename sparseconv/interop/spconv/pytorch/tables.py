"""Joins of several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.functional import sparse_add_hash_based
from sparseconv.interop.spconv.pytorch.modules import SparseModule
from sparseconv.interop.spconv.pytorch.tracing import leaf
from sparseconv.torch_private import surely

#: what a table takes
TENSORS = "a list of SparseConvTensors, at least one"


class _Table(SparseModule):
    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size


class JoinTable(_Table):
    """Channels of tensors at the same indices, side by side; they may differ in width."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        if not _are_sparse(input):
            return leaf(self, input, takes=TENSORS)
        _check_aligned(input, "JoinTable")
        return input[0].replace_feature(torch.cat([x.features for x in input], 1))


class AddTable(_Table):
    """The sum of tensors at the same indices."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        if not _are_sparse(input):
            return leaf(self, input, takes=TENSORS)
        _check_aligned(input, "AddTable")
        if len({x.features.shape[1] for x in input}) > 1:
            raise ValueError(f"AddTable takes tensors of one width; got {[tuple(x.features.shape) for x in input]}")
        total = input[0].features
        for x in input[1:]:
            total = total + x.features
        return input[0].replace_feature(total)


class AddTableMisaligned(_Table):
    """The sum of tensors at different indices, over the union of them; inverse convolutions past it find no key."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        return sparse_add_hash_based(*input) if _are_sparse(input) else leaf(self, input, takes=TENSORS)


class ConcatTable(SparseModule):
    """The results of several modules on one input, as a list."""

    def forward(self, input: Any) -> list[Any]:
        return [module(input) for module in self._modules.values() if module is not None]

    def add(self, module: torch.nn.Module) -> ConcatTable:
        """Append a module; returns itself."""
        self.add_module(str(len(self._modules)), module)
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        first: Any = self._modules["0"]
        return first.input_spatial_size(out_size)


def _are_sparse(input: Any) -> bool:
    return isinstance(input, Sequence) and bool(input) and all(isinstance(x, SparseConvTensor) for x in input)


def _check_aligned(tensors: Sequence[SparseConvTensor], name: str) -> None:
    first = tensors[0]
    if any(x.features.ndim != 2 for x in tensors):
        raise ValueError(f"{name} takes features (N, C); got {[tuple(x.features.shape) for x in tensors]}")
    for other in tensors[1:]:
        if (
            other.spatial_shape != first.spatial_shape
            or other.batch_size != first.batch_size
            or surely(other.features.shape[0] != first.features.shape[0])
            or not first._is_at(other)
        ):
            raise ValueError(
                f"{name} takes tensors at the same indices; got {first.features.shape[0]} of them in "
                f"{first.spatial_shape} and {other.features.shape[0]} in {other.spatial_shape}: functional.sparse_add "
                "adds tensors at different ones"
            )
