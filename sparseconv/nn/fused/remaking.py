"""Recomputing in the backward pass: a graph keeps a node that can recompute its result, not the result."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from sparseconv import torch_private, transforms
from sparseconv.nn.fused import normalize
from sparseconv.nn.fused.normalize import Norm

#: bytes from which the next convolution's input is computed again in the backward pass rather than kept: one more pass
#: over memory, on scenes large enough to be GPU-bound; in a captured graph, where no CPU time counts, five
#: eighths
RECOMPUTED_BYTES = 8 << 20
#: the classes of ``grad_fn`` whose nodes have a ``recipe``
_MAKERS: set[type] = set()
_NOTHING: AbstractContextManager[Any] = nullcontext()


def makes_again(node: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A node whose context has a ``recipe``, with a method ``run``, or None."""
    made = torch_private.node_class(node)
    if made is not None:
        _MAKERS.add(made)
    return node


class Recipe(NamedTuple):
    """How a node's result is recomputed, while the norm's weight and bias are unchanged."""

    z: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    kept: torch.Tensor
    norm: Norm
    versions: tuple[int, ...]

    def run(self, onto: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor, or ``onto`` (N, C) of any row stride."""
        if self.versions != versions(self.weight, self.bias):
            raise RuntimeError(
                "the weight or bias of a batch norm was changed in place between the forward and the backward pass, "
                "which needs them as they were: run backward before the optimizer's step"
            )
        return normalize.again(self.z, self.weight, self.bias, self.kept, self.norm, onto)


class Shared:
    """What another node makes again, once for two nodes that need it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._made: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        """For the first of them."""
        made: torch.Tensor = recipe_of(self._source).run()
        self._made = made
        return made

    def last(self) -> torch.Tensor:
        """For the second; it is not kept any longer."""
        made = self.run() if self._made is None else self._made
        self._made = None
        return made


def recipe_of(node: Any) -> Any:
    if node.recipe is None:
        raise RuntimeError("the graph was run backward before, which frees it: give that pass retain_graph=True")
    return node.recipe


def versions(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


def is_large(x: torch.Tensor, fixed: bool) -> bool:
    """Whether x is made again rather than kept; ``fixed``: it is on a grid of fixed size, as in a captured step."""
    return x.numel() * x.itemsize >= (RECOMPUTED_BYTES * 5 // 8 if fixed else RECOMPUTED_BYTES)


def maker_of(x: torch.Tensor, fixed: bool) -> Any:
    """The node that can make x again and should, rather than that x is kept; None where x is small or not its own."""
    source: Any = x.grad_fn
    if (
        type(source) not in _MAKERS
        or source.recipe is None
        or not is_large(x, fixed)
        or x._version
        or not torch.is_grad_enabled()
        or torch_private.others_save()
    ):
        return None
    return source


def without(x: torch.Tensor, source: Any) -> AbstractContextManager[Any]:
    """Within it, a node saves the node that can make x again in the place of x; None: it saves x."""
    if source is None:
        return _NOTHING
    address = x.data_ptr()

    def pack(tensor: torch.Tensor) -> Any:
        # detached: a node that keeps its own result, as it is, would never go
        return source if tensor.data_ptr() == address else tensor.detach()

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)


def _unpacked(kept: Any) -> torch.Tensor:
    """x as operations with a derivative take it; others make it when they come to it."""
    if isinstance(kept, torch.Tensor):
        return kept
    made: torch.Tensor = recipe_of(kept).run() if torch.is_grad_enabled() else torch.empty(0)
    return made


def is_direct() -> bool:
    """Whether no functional transform and no dispatch mode is active."""
    return not (transforms.active() or torch_private.dispatch_modes())
