"""The two operators that torch's dispatcher knows: ``torch.ops.sparseconv.convolution`` and ``weight_gradient``.

Tracing, dispatch modes, subclasses of tensors and transforms of torch.func call them; plain eager calls do not. Anybody
may call them, so they check their arguments. For a kernel map they take its `sparseconv.autograd.edges_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sparseconv.autograd import Convolution, Edges, Operator, WeightGradient, as_node, below
from sparseconv.geometry.kernel_map import KernelMap

library = torch.library.Library("sparseconv", "FRAGMENT")
library.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor edges, int groups, bool adjoint, str backend) -> Tensor"
)
library.define("weight_gradient(Tensor x, Tensor grad, Tensor edges, int groups, int taps, str backend) -> Tensor")


def _map_of(edges: Edges) -> KernelMap:
    found = edges if isinstance(edges, KernelMap) else edges.__dict__.get("kernel_map")
    if not isinstance(found, KernelMap):
        raise RuntimeError(
            "edges must be a tensor that sparseconv made for a kernel map, but this one is not. If torch.compile saves "
            "such a tensor for backward, do not move saved tensors, as torch.autograd.graph.save_on_cpu does"
        )
    return found


def checked_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    groups: int,
    adjoint: bool,
    backend: str,
) -> torch.Tensor:
    """The registered operator, which anybody may call; a plan checks its own calls."""
    kernel_map = _map_of(edges)
    _check_tensors(kernel_map, {"x": x, "weight": weight, "bias": bias})
    _check_rows("x", x, kernel_map.num_out if adjoint else kernel_map.num_in)
    if weight.ndim != 3 or weight.shape[0] != kernel_map.num_taps:
        raise ValueError(f"the weight must be ({kernel_map.num_taps}, C_in/G, C_out); got {tuple(weight.shape)}")
    group_in, c_out = weight.shape[1:]
    _check_groups(groups, c_out)
    takes = c_out if adjoint else group_in * groups
    if x.shape[1] != takes:
        raise ValueError(
            f"x has {x.shape[1]} channels, but the weight {tuple(weight.shape)} in {groups} groups takes {takes}"
        )
    if bias is not None and (adjoint or bias.shape != (c_out,)):
        wanted = "None for the adjoint" if adjoint else f"({c_out},)"
        raise ValueError(f"the bias must be {wanted}; got {tuple(bias.shape)}")
    return Convolution.kernel(x, weight, bias, kernel_map, groups, adjoint, backend)


def checked_weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: Edges, groups: int, taps: int, backend: str
) -> torch.Tensor:
    kernel_map = _map_of(edges)
    _check_tensors(kernel_map, {"x": x, "grad": grad})
    _check_rows("x", x, kernel_map.num_in)
    _check_rows("grad", grad, kernel_map.num_out)
    if taps != kernel_map.num_taps:
        raise ValueError(f"the map has {kernel_map.num_taps} taps; got taps={taps}")
    _check_groups(groups, x.shape[1], grad.shape[1])
    return WeightGradient.kernel(x, grad, kernel_map, groups, taps, backend)


def _check_tensors(kernel_map: KernelMap, given: dict[str, torch.Tensor | None]) -> None:
    first = given["x"]
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.device != kernel_map.device:
            raise ValueError(f"the map is on {kernel_map.device} but {name} is on {tensor.device}: move one of them")
        if tensor.layout != torch.strided or not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be dense and floating point; got {tensor.layout} of {tensor.dtype}")
        if first is not None and tensor.dtype != first.dtype:
            raise TypeError(f"x is {first.dtype} but {name} is {tensor.dtype}: cast one of them")


def _check_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    if tensor.ndim != 2 or tensor.shape[0] != rows:
        raise ValueError(f"{name} must be ({rows}, C), one row per voxel of the map; got {tuple(tensor.shape)}")


def _check_groups(groups: int, *channels: int) -> None:
    if groups < 1 or any(count % groups for count in channels):
        raise ValueError(f"channels must be multiples of groups; got {', '.join(map(str, channels))}, groups={groups}")


def _without_autocast(name: str, x: torch.Tensor, *args: Any) -> Any:
    """Operands are cast already, and products stay as they are."""
    with torch.autocast(x.device.type, enabled=False):
        return getattr(torch.ops.sparseconv, name)(x, *args)


Convolution.checked, WeightGradient.checked = staticmethod(checked_convolution), staticmethod(checked_weight_gradient)
_OPERATORS: Sequence[type[Operator]] = (Convolution, WeightGradient)
for _function in _OPERATORS:
    # a compiled graph has its own derivative and asks for none here: that of `torch.library.register_autograd` would
    # cost a second pass through the dispatcher, some 12 us
    library.impl(_function.name, partial(as_node, _function, partial(below, _function)), "Autograd")
    library.impl(_function.name, _function.checked, "CompositeExplicitAutograd")  # on every device
    for _kind in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1"):
        library.impl(_function.name, partial(_without_autocast, _function.name), f"Autocast{_kind}")


@torch.library.register_fake("sparseconv::convolution", lib=library)
def _(x, weight, bias, edges, groups, adjoint, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((edges.shape[0 if adjoint else 1], weight.shape[1] * groups if adjoint else weight.shape[2]))


@torch.library.register_fake("sparseconv::weight_gradient", lib=library)
def _(x, grad, edges, groups, taps, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((taps, x.shape[1] // groups, grad.shape[1]))
