"""Skip connections on a grid of fixed size, in training: their gradients, and what is kept for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sparseconv.nn.fused import normalize
from sparseconv.nn.fused.remaking import Recipe, Shared, is_direct, maker_of, makes_again, recipe_of, without
from sparseconv.torch_private import keeps_graph


class Parts(NamedTuple):
    """How a concatenation is recomputed: each part's tensor with its version, or the node that recomputes it."""

    parts: tuple[tuple[Any, int], ...]
    widths: tuple[int, ...]
    rows: int
    like: torch.Tensor  # (0,)

    def run(self) -> torch.Tensor:
        made = self.like.new_empty((self.rows, sum(self.widths)))
        for (part, version), piece in zip(self.parts, made.split(self.widths, 1)):
            if not isinstance(part, torch.Tensor):
                recipe_of(part).run(piece)
            elif part._version == version:
                _copied(part, piece)
            else:
                raise RuntimeError(
                    "features were changed in place after they were concatenated, and the backward pass needs them as "
                    "they were: change a copy"
                )
        return made


def _copied(x: torch.Tensor, onto: torch.Tensor) -> None:
    """Write x (N, C) onto rows of any stride, 16 bytes at once where they lie so."""
    places = (x.shape[1] * x.itemsize, onto.stride(0) * x.itemsize, x.data_ptr(), onto.data_ptr())
    if x.is_contiguous() and not any(place % 16 for place in places):
        x, onto = x.view(torch.complex128), onto.view(torch.complex128)
    onto.copy_(x)


@makes_again
class _Forked(torch.autograd.Function):
    """(x, x @ weight^T) for x (N, C) that one other node alone takes: its gradient is added to in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, source: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.recipe = None if source is None else Shared(source)
        return x.view_as(x), x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_y: torch.Tensor) -> tuple:  # type: ignore[override]
        (x, weight), (for_x, for_weight, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_weight = None
        if for_weight:
            remade = ctx.recipe is not None and not torch.is_grad_enabled()
            grad_weight = grad_y.t() @ (ctx.recipe.last() if remade else x)
        if not for_x:
            return None, grad_weight, None
        if torch.is_grad_enabled():
            return torch.addmm(grad, grad_y, weight), grad_weight, None
        return grad.addmm_(grad_y, weight), grad_weight, None


def branched(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (N, C) for `trained` alone, and x @ weight^T, on a grid of fixed size: one node, which adds both gradients.

    None where they need separate nodes.
    """
    if (
        type(weight) is not torch.nn.Parameter
        or weight.dtype != x.dtype
        or not (x.requires_grad and torch.is_grad_enabled())
        or not is_direct()
    ):
        return None
    source = maker_of(x, True)
    if _is_layers(source):
        return None
    with without(x, source):
        return _Forked.apply(x, weight, source)  # type: ignore[return-value]


@makes_again
class _Joined(torch.autograd.Function):
    """A concatenation that is recomputed where the backward pass needs it."""

    @staticmethod
    def forward(ctx: Any, recipe: Parts, *parts: torch.Tensor) -> torch.Tensor:
        ctx.recipe = recipe
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        widths = ctx.recipe.widths
        if not (torch.is_grad_enabled() or keeps_graph()):
            ctx.recipe = None
        return None, *grad.split(widths, 1)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """``torch.cat(parts, 1)`` of features on a grid of fixed size, made again rather than kept for gradients."""
    if (
        all(type(t) is torch.Tensor and t.dtype == parts[0].dtype and normalize.on_kernels(t) for t in parts)
        and is_direct()
    ):
        makers = [maker_of(t, True) for t in parts]
        held = tuple((t.detach() if not _is_layers(m) else m, t._version) for t, m in zip(parts, makers))
        if any(_is_layers(m) for m in makers):
            recipe = Parts(held, tuple(t.shape[1] for t in parts), len(parts[0]), parts[0].new_empty(0))
            return _Joined.apply(recipe, *parts)  # type: ignore[return-value]
    return torch.cat(parts, 1)


def _is_layers(maker: Any) -> bool:
    """Whether layers of `training` make it, for one other node alone."""
    return maker is not None and isinstance(maker.recipe, Recipe)
