"""From a layer of spconv's kind to a plan: windows that stay within a spatial shape, and what a key remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from sparseconv import transforms
from sparseconv.checks import own
from sparseconv.compiler.traced import TracedGrid, TracedPlan
from sparseconv.geometry.grid import VoxelGrid, left_trace
from sparseconv.geometry.grid_cache import known, remember
from sparseconv.geometry.ranges import IndexRange, Ints
from sparseconv.interop import arguments
from sparseconv.interop.arguments import is_unmodified
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.shared import shared_plan
from sparseconv.plan.within import plan_within
from sparseconv.torch_private import exporting, surely
from sparseconv.transforms import tracing


class Voxels(Protocol):
    """A sparse tensor, as far as a stored map asks."""

    spatial_shape: list[int]

    def _place(self) -> Place: ...


class LayerWindow(NamedTuple):
    """The window of a layer, one integer per axis."""

    kernel_size: Ints
    stride: Ints
    padding: Ints
    dilation: Ints


def find_plan(
    grid: VoxelGrid, window: LayerWindow, out_shape: Sequence[int], *, subm: bool = False, transposed: bool = False
) -> ConvolutionPlan:
    """The plan of a layer on a grid, built on first use and kept with the grid.

    Outputs are the grid itself for a submanifold layer, whose stride and padding mean nothing; else every voxel in
    [0, out_shape) that the window reaches, in lexicographic order.

    Raises:
        ValueError: an output shape without any cell.
    """
    if tracing():
        return plan_in_trace(grid, window, out_shape, subm, transposed)
    if subm:
        return shared_plan(grid, window.kernel_size, dilation=window.dilation)
    return plan_within(
        grid,
        out_shape,
        window.kernel_size,
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        generative=transposed,
    )


def plan_in_trace(
    grid: Any, window: LayerWindow, out_shape: Sequence[int], subm: bool, transposed: bool
) -> ConvolutionPlan:
    """`find_plan` while torch traces, where a shape may be known to the run of the program alone."""
    kernel, step, pad, gap = window
    if subm:
        step, pad, out_shape = (1,), (), []
    elif any([surely(cells < 1) for cells in out_shape]):
        size = {"kernel_size": kernel, "stride": step, "padding": pad, "dilation": gap}
        raise ValueError(f"a window of {size} leaves no cell of the output: its shape would be {tuple(out_shape)}")
    wanted = (subm, transposed, *kernel, *step, *pad, *gap, *out_shape)
    made = grid.derived.setdefault("spconv", [])
    for numbers, plan in made:  # a key cannot distinguish them, since the numbers may not be known yet
        if len(numbers) == len(wanted) and all([surely(a == b) for a, b in zip(numbers, wanted)]):
            return plan
    if subm:
        plan = grid.plan_type(grid, kernel, dilation=gap)
    else:
        plan = grid.plan_type.within(grid, out_shape, kernel, transposed, stride=step, padding=pad, dilation=gap)
    made.append((wanted, plan))
    return plan


def conv_size(
    shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Cells along each axis after a convolution; 1 where the kernel size is -1."""
    sizes = zip(shape, kernel, stride, padding, dilation)
    return [1 if k == -1 else (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]


def deconv_size(
    shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], extra: Sequence[int]
) -> list[int]:
    """Cells along each axis after a transposed convolution; as in spconv, dilation does not count."""
    return [(n - 1) * s - 2 * p + k + e for n, k, s, p, e in zip(shape, kernel, stride, padding, extra)]


class Place(NamedTuple):
    """Voxels and the client's tensor of their indices, as it was at that version; None where no client has one.

    A plan's own coordinates are never handed out: whoever asks for indices gets a copy, and may write to it.
    """

    indices: torch.Tensor | None
    version: int
    voxels: VoxelGrid

    @classmethod
    def of(cls, indices: torch.Tensor, voxels: VoxelGrid) -> Place:
        if torch.compiler.is_compiling():
            return cls(indices, 0, voxels)
        place = cls(indices, indices._version, voxels)
        if not voxels.is_placed:
            remember(indices, voxels)
        return place

    @classmethod
    def known(cls, indices: torch.Tensor, batch_size: int) -> Place | None:
        """That of another tensor with these very indices, as clients make them for a branch of a block; None where
        there is none any more, or somebody wrote to them."""
        found = None if torch.compiler.is_compiling() else known(indices)
        if found is None or found[1].batch_size != batch_size:
            return None
        place = cls(indices, *found)
        return place if place.is_fresh() else None

    def after_trace(self) -> Place:
        """These voxels after the trace that made them."""
        return self._replace(voxels=self.voxels.real) if left_trace(self.voxels) else self  # type: ignore[attr-defined]

    def is_fresh(self) -> bool:
        """Whether the indices are still those of the voxels, see `is_unmodified`."""
        return self.indices is None or is_unmodified(self.indices, self.version, self.voxels.coords)

    def read(self) -> torch.Tensor:
        """(N, 1+D) int32 for a client."""
        return own(self.voxels.coords) if self.indices is None else self.indices

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy's indices have a version of their own; what was written to since stays behind."""
        return _travelled, (self.indices if self.is_fresh() else None, self.voxels)


def _travelled(indices: torch.Tensor | None, voxels: VoxelGrid) -> Place:
    if indices is None:
        return Place(None, 0, voxels)
    if indices.is_inference():  # which counts no writes
        indices = own(indices)
    return Place(indices, indices._version, voxels)


def place_in_trace(indices: torch.Tensor | None, kept: Place | None, items: int) -> Place:
    """The voxels of a tensor while torch traces; nothing of it is written into one that was made before.

    A client's indices of then are looked at anew, since the program runs again after he wrote to them.
    """
    if kept is not None and isinstance(kept.voxels, TracedGrid) and kept.voxels.batch_size == items:
        return kept
    if indices is not None:
        return Place(indices, 0, VoxelGrid(indices, items))
    return Place(None, 0, TracedGrid.of(kept.voxels))  # type: ignore[union-attr]


def check_inside(voxels: VoxelGrid, shape: Sequence[int]) -> None:
    """Raise ValueError where a voxel lies outside of [0, shape); looked at once for a grid, which knows its extent."""
    if tracing():
        if isinstance(voxels, TracedGrid):
            voxels.lie_within(shape)
        return
    key = ("inside", tuple(shape))
    if key not in voxels.derived:
        _look_inside(voxels, shape)
        voxels.derived[key] = True


@transforms.untraced
def _look_inside(voxels: VoxelGrid, shape: Sequence[int]) -> None:
    if exporting() or not len(voxels) or voxels.count is not None:
        return
    if not IndexRange.of_shape(shape).encloses(voxels.known_box[0]):
        arguments.check_inside("indices", voxels, shape, "spatial_shape")


class IndiceData:
    """What an ``indice_key`` remembers: the plan of the layer that made it, and the two ends of it.

    ``indice_pairs`` (2, K, N_in), ``pair_fwd`` (K, N_out) and ``pair_bwd`` (K, N_in), int32 with -1 for no pair, are
    made when they are read.
    """

    def __init__(
        self,
        plan: ConvolutionPlan,
        place: Place,
        out_place: Place,
        spatial_shape: list[int],
        out_spatial_shape: list[int],
        is_subm: bool,
        algo: ConvAlgo,
        window: LayerWindow,
    ) -> None:
        self._plan, self._place, self._out_place = plan, place, out_place
        self._ends = (plan.source, plan.target)  # a plan that its grid keeps does not keep that grid
        self.spatial_shape, self.out_spatial_shape = list(spatial_shape), list(out_spatial_shape)
        self.is_subm, self.algo, self.window = is_subm, algo, window
        self.ksize, self.stride = list(window.kernel_size), list(window.stride)
        self.dilation, self.padding = list(window.dilation), list(window.padding)
        self.voxel_num = None

    @property
    def plan(self) -> ConvolutionPlan:
        return self._plan.real if isinstance(self._plan, TracedPlan) and not tracing() else self._plan

    @property
    def place(self) -> Place:
        return self._place.after_trace()

    @property
    def out_place(self) -> Place:
        return self._out_place.after_trace()

    def inverse_plan(self) -> ConvolutionPlan:
        """The plan reversed, kept with the grid that it leads back to."""
        if tracing():
            return self.plan.transpose()
        fine, coarse = self.plan.source, self.plan.target
        key = ("back within", self.window, tuple(self.out_spatial_shape), self.plan.is_transposed)
        plan = fine.derived.get(key)
        if plan is None or plan.source is not coarse:
            plan = self.plan.transpose().weak_copy(fine)
            fine.derived[key] = plan
        return plan

    @property
    def indices(self) -> torch.Tensor:
        return self.place.read()

    @property
    def out_indices(self) -> torch.Tensor:
        return self.out_place.read()

    @property
    def indice_pairs(self) -> torch.Tensor:
        return pair_table(self.plan)[0]

    @property
    def indice_pair_num(self) -> torch.Tensor:
        return pair_table(self.plan)[1]

    @property
    def pair_fwd(self) -> torch.Tensor:
        return self.plan.kernel_map.neighbors.clone()

    @property
    def pair_bwd(self) -> torch.Tensor:
        return self.plan.kernel_map.reverse().neighbors.clone()


def pair_table(plan: ConvolutionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The edges of a plan as spconv tables them: pairs (2, K, N_in) with -1 past each tap's end, and counts (K,)."""
    edges = plan.kernel_map
    table = torch.full((2, edges.num_taps, edges.num_in), -1, dtype=torch.int32, device=edges.device)
    taps = edges.pair_taps.long()
    place = torch.arange(edges.num_pairs, device=edges.device) - edges.tap_offsets[taps]
    table[0, taps, place] = edges.in_rows
    table[1, taps, place] = edges.out_rows
    return table, edges.tap_offsets.diff().int()


def check_reuse(stored: IndiceData, input: Voxels, ksize: list[int], dilation: list[int], key: str | None) -> None:
    """Raise ValueError where a submanifold layer meets a key that another geometry stored."""
    if not stored.is_subm:
        raise ValueError(f"indice_key {key!r} was stored by a layer that is not submanifold")
    for name, mine, theirs in (("kernel size", ksize, stored.ksize), ("dilation", dilation, stored.dilation)):
        if mine != theirs:
            raise ValueError(
                f"layers with one indice_key have one {name}: {key!r} was stored with {theirs}, this layer has {mine}"
            )
    check_ends(input, stored.spatial_shape, stored.place, key)


def check_ends(input: Voxels, shape: list[int], place: Place, key: str | None) -> None:
    """Raise ValueError where a stored map does not start at the input's voxels."""
    if input.spatial_shape != shape:
        raise ValueError(f"indice_key {key!r} belongs to spatial shape {shape}; the input has {input.spatial_shape}")
    kept = input._place()
    if kept.voxels is place.voxels and kept.indices is place.indices:  # fresh, as the input's are
        return
    if tracing() and kept.indices is not None and kept.indices is place.indices:
        return  # of a tensor that was made before the trace, and is looked at anew by each layer that reads it
    if not place.is_fresh():
        raise ValueError(
            f"the indices that indice_key {key!r} was stored for were written to since, and its map is that of the old "
            "ones: write to a copy, or give this layer another key"
        )
    if kept.voxels is place.voxels:
        return
    mine, stored = kept.voxels.coords, place.voxels.coords
    if mine.shape != stored.shape or not torch.equal(mine, stored):
        raise ValueError(
            f"indice_key {key!r} belongs to other voxels ({stored.shape[0]} of them) than the input's "
            f"({mine.shape[0]}): a key names one geometry; use another key"
        )
