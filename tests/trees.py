"""Torch's trees as they are before torch 2.13, where they look into sparse tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils import _pytree

from sparseconv.tensor import SparseTensor, _with_leaf


@contextmanager
def that_look_into_sparse_tensors() -> Iterator[None]:
    """Whatever torch is here."""
    added = SparseTensor not in _pytree.SUPPORTED_NODES
    if added:
        _pytree.register_pytree_node(SparseTensor, lambda x: ([x.features], x.grid), _with_leaf)
    try:
        yield
    finally:
        if added:
            _pytree._deregister_pytree_node(SparseTensor)
