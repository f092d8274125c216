"""What a scale or a product is given, checked before anything is launched or written."""

from __future__ import annotations

import torch

from sparseconv.checks import check_tensor, described
from sparseconv.products.info import Info
from sparseconv.products.table import Product

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cast(x: torch.Tensor) -> torch.Tensor:
    """Under autocast the inputs take its dtype, as those of a convolution do; sums stay in fp32."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def check_info(name: str, argument: str, info: object, kind: type, optional: bool = False) -> None:
    """Raise TypeError unless ``info`` is one of this kind."""
    if not isinstance(info, kind) and not (optional and info is None):
        raise TypeError(
            f"{name} takes {argument} as a {kind.__name__}, but got {described(info)}: builders make one of index lists"
        )


def check_input(name: str, argument: str, x: torch.Tensor, info: Info) -> None:
    """Raise for an input of another kind, dtype or device than the call takes."""
    check_tensor(f"{name}: {argument}", x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} takes {argument} in fp16, bf16, fp32 or fp64, but its dtype is {x.dtype}")
    device = info.device
    if device is not None and x.device != device:
        raise ValueError(
            f"{name} needs {argument} and info on one device, but {argument} is on {x.device} and info on {device}; "
            f"move one of them, info.to({str(x.device)!r}) for the info"
        )


def _check_rows(name: str, argument: str, rows: int, known: int | None, least: int) -> None:
    if rows < least if known is None else rows != known:
        needs = f"at least {least}" if known is None else known
        raise ValueError(f"{name} with this info needs {needs} rows in {argument}, but {argument} has {rows}")


def check_backward(name: str, argument: str, x: torch.Tensor, missing: str, builder: str) -> None:
    """Raise where a gradient will be needed whose info was not given."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} needs {missing} because {argument} requires a gradient, but it was not given: "
            f"{builder} makes the forward and backward infos together, backward_infos(info, ...) those of an info made "
            "by hand"
        )


def _shape_text(axes: str, rows: str) -> str:
    inner = ", ".join([rows, *axes.upper()])
    return f"(N, {inner}) or shared ({inner}{',' if not axes else ''})"


def check_shapes(row: Product, x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise where the shapes of x and y do not fit each other."""
    name = f"sparse_{row.name}"
    if x.device != y.device:
        raise ValueError(f"{name} needs x and y on one device, but they are on {x.device} and {y.device}")
    for argument, tensor, axes, rows in (("x", x, row.axes1, "M1"), ("y", y, row.axes2, "M2")):
        if tensor.dim() - len(axes) not in (1, 2):
            raise ValueError(
                f"{name} takes {argument} of shape {_shape_text(axes, rows)}, "
                f"but got shape {tuple(tensor.shape)} of rank {tensor.dim()}"
            )
    if x.dim() == len(row.axes1) + 2 and y.dim() == len(row.axes2) + 2 and x.shape[0] != y.shape[0]:
        raise ValueError(f"{name} needs one batch size N, but x has {x.shape[0]} items and y {y.shape[0]}")
    sizes2 = dict(zip(row.axes2, y.shape[y.dim() - len(row.axes2) :]))
    for axis, size in zip(row.axes1, x.shape[x.dim() - len(row.axes1) :]):
        if axis in sizes2 and sizes2[axis] != size:
            raise ValueError(
                f"{name} takes x {_shape_text(row.axes1, 'M1')} and y {_shape_text(row.axes2, 'M2')} with the same "
                f"{axis.upper()}, but got shapes {tuple(x.shape)} and {tuple(y.shape)}"
            )


def check_sizes(name: str, rows: tuple[int, ...], info: Info, backward: dict[str, Info | None]) -> None:
    """Raise where inputs of so many ``rows`` are not what the info reads, or the infos do not turn into each other."""
    for argument, there, known, least in zip("xy", rows, info.in_sizes, info.least_in_sizes):
        _check_rows(name, argument, there, known, least)
    sides = (*rows, info.num_rows)
    for turn, (argument, turned) in enumerate(backward.items()):
        if turned is not None:
            _check_turned(name, argument, turned, sides[turn:] + sides[:turn])


def _check_turned(name: str, argument: str, info: Info, rows: tuple[int, ...]) -> None:
    """``rows``: those that a backward info must write, then those of each input that it reads."""
    known, least = info.in_sizes, info.least_in_sizes
    fits = info.num_rows == rows[0] and all(
        (size is None or size == there) and there >= needed for there, size, needed in zip(rows[1:], known, least)
    )
    if not fits:
        has = (info.num_rows, *(at_least if size is None else size for size, at_least in zip(known, least)))
        raise ValueError(
            f"{name} needs {argument} to write {rows[0]} rows from {' and '.join(map(str, rows[1:]))}, but it "
            f"writes {has[0]} from {' and '.join(map(str, has[1:]))}: builders make infos that turn into each other"
        )


def out_shape(row: Product, x: torch.Tensor, y: torch.Tensor, rows: int, out_accumulated: bool) -> tuple[int, ...]:
    """The shape of a product: (N, rows, dense...), without N where both inputs lack it or the batch is summed."""
    first, second = x.dim() - len(row.axes1), y.dim() - len(row.axes2)
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[first:], *y.shape[second:]]))
    batch = () if out_accumulated or max(first, second) == 1 else (x.shape[0] if first == 2 else y.shape[0],)
    return (*batch, rows, *(dense[axis] for axis in row.axes_out))


def check_out(
    name: str, out: object, shape: tuple[int, ...], dtype: torch.dtype, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """``out`` itself, if the result can be written to it: its shape, dtype and device, and nobody's derivative.

    Raises ValueError or TypeError otherwise, before anything is written.
    """
    check_tensor(f"{name}: out", out)
    assert isinstance(out, torch.Tensor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *inputs)):
        raise ValueError(
            f"{name} with out= is not differentiable, but an argument requires a gradient: "
            f"leave out= out, or call it under torch.no_grad()"
        )
    if tuple(out.shape) != shape:
        raise ValueError(
            f"{name}: the result has shape {shape}, but out has {tuple(out.shape)}: pass one of that shape"
        )
    if out.dtype != dtype:
        raise TypeError(f"{name}: the result is {dtype}, but out is {out.dtype}: pass one of that dtype")
    if out.device != inputs[0].device:
        raise ValueError(f"{name}: the result is on {inputs[0].device}, but out is on {out.device}: move one of them")
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(out.shape, out.stride()) if size > 1):
        if step <= reach:
            raise ValueError(
                f"{name}: elements of out share memory, its shape being {tuple(out.shape)} and its strides "
                f"{out.stride()}: pass out.contiguous() or another tensor"
            )
        reach += step * (size - 1)
    return out
