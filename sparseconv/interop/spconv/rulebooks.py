"""Convolutions over rulebooks that a client holds by hand: tables of pairs, as `ops.get_indice_pairs` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseconv.geometry.arguments import INTEGERS
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.interop.arguments import whole
from sparseconv.interop.spconv.core import activated
from sparseconv.kinds import check_values
from sparseconv.plan.convolution import autocast, check_operands
from sparseconv.plan.fused import fused_convolution
from sparseconv.plan.weights import packed
from sparseconv.torch_private import any_autocast


def of_pairs(pairs: torch.Tensor, counts: torch.Tensor, rows: int, num_out: int, inverse: bool = False) -> KernelMap:
    """The edges of a table (2, K, N), of which each tap has so many; ``inverse`` exchanges its two halves.

    Raises:
        ValueError: a pair of rows that there are not, or two pairs of one output at one tap.
    """
    check_values("indice_pairs", pairs, "(2, K, N) integers")
    check_values("indice_pair_num", counts, "(K,) integers")
    if pairs.ndim != 3 or len(pairs) != 2 or pairs.dtype not in INTEGERS:
        raise ValueError(f"indice_pairs must be (2, K, N) integers; got {tuple(pairs.shape)} {pairs.dtype}")
    if counts.shape != pairs.shape[1:2] or counts.dtype not in INTEGERS:
        raise ValueError(f"indice_pair_num must be ({pairs.shape[1]},) integers; got {tuple(counts.shape)}")
    (num_out,) = whole([num_out], "num_activate_out", 0)
    held = torch.arange(pairs.shape[2], device=pairs.device) < counts.to(pairs.device)[:, None]
    taps = held.nonzero()[:, 0]
    given = pairs.flip(0) if inverse else pairs
    into, out = (side[held].long() for side in given)
    _check_rows("indice_pairs", into, 0, rows)
    _check_rows("indice_pairs", out, 0, num_out)
    table = torch.full((pairs.shape[1], num_out), -1, dtype=torch.int32, device=pairs.device)
    table[taps, out] = into.int()
    if int((table >= 0).sum()) != len(taps):
        raise ValueError(
            "indice_pairs must name an output once at each tap, but some name one twice: number such pairs as taps of "
            "their own"
        )
    return KernelMap(rows, num_out, pairs.shape[1], neighbors=table)


def of_table(pair_fwd: torch.Tensor, rows: int, num_out: int) -> KernelMap:
    """The edges of a table (K, N_out) of input rows, -1 for none."""
    check_values("pair_fwd", pair_fwd, "(K, N_out) integers")
    (num_out,) = whole([num_out], "num_activate_out", 0)
    if pair_fwd.ndim != 2 or pair_fwd.shape[1] != num_out or pair_fwd.dtype not in INTEGERS:
        raise ValueError(f"pair_fwd must be (K, {num_out}) integers; got {tuple(pair_fwd.shape)} {pair_fwd.dtype}")
    _check_rows("pair_fwd", pair_fwd, -1, rows)
    return KernelMap(rows, num_out, len(pair_fwd), neighbors=pair_fwd.int().contiguous())


def _check_rows(name: str, found: torch.Tensor, least: int, rows: int) -> None:
    if found.numel():
        low, high = torch.stack(torch.aminmax(found)).tolist()
        if low < least or high >= rows:
            raise ValueError(f"{name} must name rows from {least} to {rows - 1} here; got {low} to {high}")


def check_features(features: torch.Tensor) -> None:
    """Raise unless features are (N, C)."""
    check_values("features", features, "(N, C)")
    if features.ndim != 2:
        raise ValueError(f"features must be (N, C); got {tuple(features.shape)}")


def convolved(
    features: torch.Tensor,
    filters: torch.Tensor,
    edges: KernelMap,
    bias: torch.Tensor | None = None,
    act_type: Any = None,
    act_alpha: float = 0.0,
) -> torch.Tensor:
    """Features (N, C_in) over edges, for filters (C_out, *kernel, C_in); differentiable to any order."""
    check_values("filters", filters, "(C_out, *kernel, C_in)")
    if bias is not None:
        check_values("bias", bias, "(C_out,)")
    if filters.ndim < 3 or filters[0, ..., 0].numel() != edges.num_taps:
        raise ValueError(f"filters must be (C_out, *kernel, C_in) of {edges.num_taps} taps; got {tuple(filters.shape)}")
    for name, tensor in (("features", features), ("filters", filters), ("bias", bias)):
        if tensor is not None and tensor.device != edges.device:
            raise ValueError(f"the pairs are on {edges.device}, {name} on {tensor.device}: move one of them")
    x, taps = features, filters.flatten(1, -2).permute(1, 2, 0)
    if any_autocast():
        x, taps, bias, _ = autocast(x, taps, bias, None)
    taps = packed(taps)
    check_operands(edges, 1, x, filters, taps, bias, None)
    y = fused_convolution(x, taps, bias, None, None, edges, 1, "auto")
    return activated(y, act_type, act_alpha)


def gradients(
    features: torch.Tensor, filters: torch.Tensor, out_bp: torch.Tensor, edges: KernelMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of features and filters."""
    x, w = (t.detach().requires_grad_() for t in (features, filters))
    with torch.enable_grad():
        y = convolved(x, w, edges)
    check_values("out_bp", out_bp, f"{tuple(y.shape)}")
    if out_bp.shape != y.shape:
        raise ValueError(f"out_bp must be {tuple(y.shape)}; got {tuple(out_bp.shape)}")
    of_features, of_filters = torch.autograd.grad(y, (x, w), out_bp)
    return of_features, of_filters


def indice_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    algo: Any = None,
    timer: Any = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """A convolution over pairs (2, K, N) and their numbers (K,); ``algo``, ``timer``, ``act_beta`` have no effect.

    Args:
        features: (N_in, C_in).
        filters: (C_out, *kernel, C_in).
        indice_pairs, indice_pair_num, num_activate_out: of `ops.get_indice_pairs`; the last is the number of outputs.
        bias: (C_out,) or None.
        act_alpha, act_type: an activation after it, as for the layers.

    Returns:
        (num_activate_out, C_out); differentiable to any order.
    """
    check_features(features)
    edges = of_pairs(indice_pairs, indice_pair_num, len(features), num_activate_out)
    return convolved(features, filters, edges, bias, act_type, act_alpha)


def indice_inverse_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    algo: Any = None,
    timer: Any = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """`indice_conv` with the pairs backwards: from a layer's outputs to its inputs."""
    check_features(features)
    edges = of_pairs(indice_pairs, indice_pair_num, len(features), num_activate_out, inverse=True)
    return convolved(features, filters, edges, bias, act_type, act_alpha)


def implicit_gemm(
    features: torch.Tensor,
    filters: torch.Tensor,
    pair_fwd: torch.Tensor,
    pair_bwd: torch.Tensor | None,
    pair_mask_fwd_splits: Any,
    pair_mask_bwd_splits: Any,
    mask_argsort_fwd_splits: Any,
    mask_argsort_bwd_splits: Any,
    num_activate_out: int,
    masks: Any = None,
    is_train: bool = True,
    is_subm: bool = False,
    timer: Any = None,
    fp32_accum: bool | None = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """A convolution over the table ``pair_fwd`` (K, N_out) of input rows; the other tables and flags have no effect."""
    check_features(features)
    edges = of_table(pair_fwd, len(features), num_activate_out)
    return convolved(features, filters, edges, bias, act_type, act_alpha)


def by_name(name: str, call: Callable[..., torch.Tensor]) -> type:
    return type(name, (), {"apply": staticmethod(call), "__doc__": f"`{call.__name__}`, by its autograd function."})


#: spconv's autograd functions, of which clients call ``apply``; the submanifold one has the same pairs
SparseConvFunction = by_name("SparseConvFunction", indice_conv)
SubMConvFunction = by_name("SubMConvFunction", indice_conv)
SparseInverseConvFunction = by_name("SparseInverseConvFunction", indice_inverse_conv)
SparseImplicitGemmFunction = by_name("SparseImplicitGemmFunction", implicit_gemm)
indice_subm_conv = indice_conv
