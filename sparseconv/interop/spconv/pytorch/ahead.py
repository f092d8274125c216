"""At a network's first call: compile what all its layers will launch, beside the call.

Layers are known by their making, the voxels by the input of the first that runs. Layers are taken in the order in which
they were made. One with a stride starts from the coarsest voxels on which the last layer gave as many channels as it
takes; keys say what belongs together. A wrong guess costs a kernel that nobody asks for, and another that is compiled
when it is met.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sparseconv.geometry.window import Window
from sparseconv.gpu.compiling.starting import start_early

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sparseconv.backends.triton_implicit_gemm.ahead import ExpectedLayer
    from sparseconv.interop.spconv.pytorch.core import SparseConvTensor

logger = logging.getLogger(__name__)


class Layer(Protocol):
    """A convolution, as far as it is known when it is made."""

    ndim: int
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    subm: bool
    inverse: bool
    transposed: bool
    conv1x1: bool
    indice_key: str | None
    bias: torch.nn.Parameter | None
    training: bool

    def out_shape_of(self, spatial_shape: Sequence[int]) -> list[int]: ...


#: the share of a window's cells that are occupied, of scans
DENSITY = 0.3
#: channels whose kernels take the longest to compile
WIDE = 256

#: layers that are noted at most: where none ever runs on a GPU, old ones are forgotten
MOST_NOTED = 4096

#: layers that did not run yet
_made: list[weakref.ref[Layer]] = []


def register(layer: Layer) -> None:
    """Note a layer that was made, and start what will compile its kernels."""
    start_early()
    if len(_made) >= MOST_NOTED:
        _made[:] = [made for made in _made if made() is not None][-MOST_NOTED // 2 :]
    _made.append(weakref.ref(layer))


def begin(input: SparseConvTensor) -> None:
    """Start to compile what the layers made since the last time will launch, if this is a call on a GPU."""
    if torch.compiler.is_compiling() or not _made or not input.features.is_cuda:
        return
    if torch.cuda.is_current_stream_capturing():
        return
    layers = [layer for layer in (made() for made in _made) if layer is not None]
    _made.clear()
    try:
        compile_layers(layers, input.indices, input.spatial_shape, input.batch_size, _dtype_of(input.features))
    except Exception:  # nothing depends on it
        logger.debug("layers are compiled when they are met", exc_info=True)


def compile_layers(
    layers: Iterable[Layer],
    indices: torch.Tensor,
    spatial_shape: list[int],
    batch_size: int,
    dtype: torch.dtype,
    trained: bool | None = None,
) -> None:
    """Start to compile what layers take that run on voxels like these (N, 1+D), in processes beside this one.

    ``trained``: gradients too; default: of layers in training mode, where torch records gradients.
    """
    from sparseconv.backends.triton_implicit_gemm import ahead  # Triton is loaded where it is used
    from sparseconv.geometry.gpu.ahead import tables_ahead
    from sparseconv.gpu.launcher import compilers_for
    from sparseconv.nn.fused import normalize

    device = indices.device
    pool = compilers_for(device.index)
    if pool is None or not pool.is_usable:
        return
    if trained is None:
        trained = torch.is_grad_enabled() and any(layer.training for layer in layers)
    tables_ahead(device, indices.shape[1])
    expected = list(dict.fromkeys(expected_layers(layers, indices, spatial_shape, batch_size, dtype)))
    for layer in expected:  # what takes longest begins first, and what is met first
        ahead.schedules_ahead(layer, dtype, device)
    for layer in expected:
        layer.map.ahead(device)
    if trained:
        normalize.ahead([layer.c_out for layer in expected], device, dtype)
    by_width = sorted(expected, key=lambda layer: max(layer.c_in, layer.c_out) < WIDE)
    for layer in by_width:
        ahead.forward_ahead(layer, dtype, device)
    if not trained:
        return
    for layer in expected:
        ahead.schedules_ahead(layer, dtype, device, transposed=True)
    for layer in by_width:
        ahead.gradients_ahead(layer, dtype, device)


def expected_layers(
    layers: Iterable[Layer],
    indices: torch.Tensor,
    spatial_shape: list[int],
    batch_size: int,
    dtype: torch.dtype,
) -> Iterator[ExpectedLayer]:
    """What is known about layers before they run, in the order of their making; not of transposed ones."""
    from sparseconv.backends.triton_implicit_gemm.ahead import ExpectedLayer  # Triton is loaded where it is used
    from sparseconv.geometry.gpu.ahead import ExpectedMap

    levels = [_Level(indices, list(spatial_shape))]
    at, channels = 0, [0]  # channels: that the last layer on a level gave
    known: dict[str, tuple[int, ExpectedMap]] = {}
    for number, layer in enumerate(layers):
        key, rank, size = layer.indice_key, layer.ndim, layer.kernel_size
        if (layer.conv1x1 and layer.groups == 1) or layer.transposed or rank != indices.shape[1] - 1:
            continue
        turned = False
        if key is not None and key in known and (layer.subm or layer.inverse):
            at, found = known[key]
            turned = layer.inverse
        elif layer.inverse:
            continue
        elif layer.subm:
            margin = [d * (k // 2) for k, d in zip(size, layer.dilation)]
            offsets = Window.of(rank, size, 1, layer.dilation, margin).offsets
            rows = levels[at].rows
            found = ExpectedMap(offsets, (1,) * rank, True, rows, rows, max(1, round(rows * len(offsets) * DENSITY)))
        else:
            alike = [level for level, count in enumerate(channels) if count == layer.in_channels]
            fine = alike[-1] if alike else len(levels) - 1
            window = Window.of(rank, size, layer.stride, layer.dilation, layer.padding)
            coarse, pairs = levels[fine].strided(layer, batch_size)
            found = ExpectedMap(window.offsets, window.stride, False, levels[fine].rows, coarse.rows, pairs)
            levels.append(coarse)
            channels.append(0)
            at = len(levels) - 1
            if key is not None:
                known.setdefault(key, (fine, found))
        if key is not None:
            known.setdefault(key, (at, found))
        channels[at] = layer.out_channels
        bias = None if layer.bias is None else dtype if torch.is_autocast_enabled("cuda") else layer.bias.dtype
        yield ExpectedLayer(found, layer.in_channels, layer.out_channels, layer.groups, turned, bias, number > 0)


class _Level(NamedTuple):
    """Voxels of one resolution."""

    indices: torch.Tensor  # (N, 1+D)
    shape: list[int]

    @property
    def rows(self) -> int:
        return self.indices.shape[0]

    def strided(self, layer: Layer, batch_size: int) -> tuple[_Level, int]:
        """The voxels that a layer with a stride reaches, and the number of pairs."""
        shape, pairs = layer.out_shape_of(self.shape), torch.ones_like(self.indices[:, 0], dtype=torch.int64)
        rows = self.indices.long()
        for axis in range(layer.ndim):
            pairs *= _reached(self.indices[:, 1 + axis].long(), layer, axis, shape[axis])[1].sum(1)
            cells, met = _reached(rows[:, 1 + axis], layer, axis, shape[axis])
            rows = rows.repeat_interleave(cells.shape[1], 0)
            rows[:, 1 + axis] = cells.flatten()
            sizes = [batch_size, *shape[: axis + 1], *self.shape[axis + 1 :]]
            rows = _distinct(rows[met.flatten()], sizes)
        return _Level(rows, shape), max(1, int(pairs.sum()))


def _reached(column: torch.Tensor, layer: Layer, axis: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, k) coarse places from which fine ones are seen on an axis, and whether there is such a place."""
    taps = torch.arange(layer.kernel_size[axis], device=column.device) * layer.dilation[axis]
    shifted = column[:, None] + layer.padding[axis] - taps
    cells = torch.div(shifted, layer.stride[axis], rounding_mode="floor")
    return cells, (cells * layer.stride[axis] == shifted) & (cells >= 0) & (cells < size)


def _distinct(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Each row (N, 1+D) once, of numbers below ``sizes``."""
    keys = torch.zeros_like(rows[:, 0])
    for column, size in enumerate(sizes):
        keys = keys * size + rows[:, column]
    keys = torch.unique(keys)
    columns = []
    for size in reversed(sizes):
        columns.append(keys % size)
        keys = torch.div(keys, size, rounding_mode="floor")
    return torch.stack(columns[::-1], 1)


def _dtype_of(features: torch.Tensor) -> torch.dtype:
    if torch.is_autocast_enabled("cuda") and features.dtype != torch.float64:
        return torch.get_autocast_dtype("cuda")
    return features.dtype
