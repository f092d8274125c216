"""Kernel maps by number, as operators' schemas know them, and what an operator checks before it runs on one."""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from functools import partial

import torch

from sparseconv import transforms
from sparseconv.geometry.kernel_map import KernelMap

_maps: dict[int, weakref.ref[KernelMap]] = {}
_numbers = itertools.count()


def _start_anew() -> None:
    """Draw the first of this process's numbers: one that another process wrote down names no map here."""
    global _numbers
    _numbers = itertools.count(1 + secrets.randbits(61))


_start_anew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@transforms.untraced
def number_of(kernel_map: KernelMap) -> int:
    """The number under which operators find this map while it lives, in this process alone."""
    number = kernel_map.prepared.get("number")
    if number is None:
        mine = next(_numbers)
        _maps[mine] = weakref.ref(kernel_map, partial(_maps.pop, mine))  # found before another thread reads the number
        number = kernel_map.prepared.setdefault("number", mine)
    return number


def alive(number: int) -> KernelMap | None:
    """The map for a graph node to hold; none while torch traces with a symbol for the number, for any scene."""
    return _maps.get(number, _gone)() if isinstance(number, int) else None


def _gone() -> None:
    """Stands for a map that is no more."""


def map_of(number: int) -> KernelMap:
    """The map of this number. Raises RuntimeError for one that is gone, or that another process numbered."""
    found = _maps.get(number, _gone)()
    if found is None:
        raise RuntimeError(
            f"kernel map {number} is gone, or is another process's: keep the plan alive as long as its graph (a "
            "compiled module must hold it); a program saved with a map's number in it cannot run elsewhere"
        )
    return found


def check_convolution(
    kernel_map: KernelMap,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    groups: int,
    adjoint: bool,
) -> None:
    """Raise ValueError or TypeError where operands of the operator ``convolution`` do not fit its map."""
    rows_in, rows_out = kernel_map.num_in, kernel_map.num_out
    if adjoint:
        rows_in, rows_out = rows_out, rows_in
    _check_tensors(kernel_map, {"x": x, "weight": weight, "bias": bias})
    _check_rows("x", x, rows_in)
    if rows != rows_out:
        raise ValueError(f"the result has {rows_out} rows, one a voxel of the map; got rows={rows}")
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


def check_weight_gradient(kernel_map: KernelMap, x: torch.Tensor, grad: torch.Tensor, taps: int, groups: int) -> None:
    """Raise ValueError or TypeError where operands of the operator ``weight_gradient`` do not fit its map."""
    _check_tensors(kernel_map, {"x": x, "grad": grad})
    _check_rows("x", x, kernel_map.num_in)
    _check_rows("grad", grad, kernel_map.num_out)
    if taps != kernel_map.num_taps:
        raise ValueError(f"the map has {kernel_map.num_taps} taps; got taps={taps}")
    _check_groups(groups, x.shape[1], grad.shape[1])


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
        raise ValueError(f"{name} must be ({rows}, C), one row a voxel of the map; got {tuple(tensor.shape)}")


def _check_groups(groups: int, *channels: int) -> None:
    if groups < 1 or any(count % groups for count in channels):
        raise ValueError(f"channels must be multiples of groups; got {', '.join(map(str, channels))}, groups={groups}")
