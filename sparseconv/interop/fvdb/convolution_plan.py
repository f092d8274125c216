"""fVDB's convolution plans: fine = stride * coarse + tap - floor((kernel_size - 1) / 2)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

import torch

from sparseconv.checks import check_count, check_kind, check_values
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.fvdb.grid_batch import GridBatch, steps
from sparseconv.interop.fvdb.jagged_tensor import JaggedTensor
from sparseconv.plan.convolution import ConvolutionPlan as Plan


class ConvolutionTopologyPolicy(str, Enum):
    """Which outputs a plan has: all that see an input, or those of a given grid."""

    COMPLETE = "complete"
    RESTRICTED = "restricted"


class ConvolutionTopologyProvenance(str, Enum):
    """Where the outputs of a plan are from."""

    GENERATED = "generated"
    EXPLICIT_TARGET = "explicit_target"
    EXACT_TRANSPOSE = "exact_transpose"


class ConvolutionPhasePolicy(str, Enum):
    """Where a window begins: floor((kernel_size - 1) / 2) before its voxel."""

    TORCH_SAME_PHASE = "torch_same_phase"


# ---- the window of a plan, and whether two grids lie in one lattice


#: how far voxel sizes and origins may differ, relative and in voxels
TOLERANCE = 1e-6


@dataclass(frozen=True)
class ConvolutionTransformCompatibility:
    """Whether a fine grid and a coarse one lie in one lattice: coarse voxels ``stride`` as large, at one origin."""

    fine_grid_count: int
    coarse_grid_count: int
    same_batch_size: bool
    same_device: bool
    scale_compatible: bool
    registration_integer: bool
    registration_zero: bool
    compatible: bool
    registration_offset: torch.Tensor | None


class ConvolutionGeometry:
    """The window of a plan."""

    semantics_version = 1
    phase_policy = ConvolutionPhasePolicy.TORCH_SAME_PHASE.value

    def __init__(self, kernel_size: Ints, stride: Ints) -> None:
        self.kernel_size, self.stride = list(kernel_size), list(stride)
        self.padding_before = [(k - 1) // 2 for k in kernel_size]
        self.padding_after = [k - 1 - p for k, p in zip(kernel_size, self.padding_before)]
        self.dilation, self.registration_offset = [1, 1, 1], [0, 0, 0]
        self.kernel_volume = math.prod(kernel_size)


def compatibility(
    fine: GridBatch, coarse: GridBatch, geometry: ConvolutionGeometry
) -> ConvolutionTransformCompatibility:
    """What is known about two grids in one lattice; ValueError for grids that are not."""
    counts = fine.grid_count, coarse.grid_count
    advice = "the target needs voxels of stride times the size, and the same origins; coarsened_grid moves origins"
    if counts[0] != counts[1]:
        raise ValueError(f"fine and coarse grids must have the same batch size; got {counts[0]} and {counts[1]}")
    if fine.device != coarse.device:
        raise ValueError(
            f"fine and coarse grids must be on the same device; got {fine.device} and {coarse.device}: move one"
        )
    wanted = fine._sizes * torch.tensor(geometry.stride, dtype=torch.float64)
    if not torch.allclose(coarse._sizes, wanted, atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(
            f"voxel size mismatch: coarse ones are {coarse._sizes.tolist()}, not {wanted.tolist()}: {advice}"
        )
    offset = (coarse._origins - fine._origins) / fine._sizes
    if not torch.allclose(offset, offset.round(), atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(f"the grids are a fractional number of voxels apart, and only a=0 is supported: {advice}")
    if not torch.allclose(offset, torch.zeros_like(offset), atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(f"the grids are a nonzero integer number of voxels apart, and only a=0 is supported: {advice}")
    return ConvolutionTransformCompatibility(*counts, True, True, True, True, True, True, offset)


# ---- how many pairs the rows of a plan have


#: kernel sizes and strides that a process was warned of
_WARNED_INCOMPLETE_COVERAGE_GEOMETRIES: set[tuple[Ints, Ints]] = set()


class ConvolutionCoverageWarning(UserWarning):
    """Windows of a plan leave some voxels out, since the stride is larger than the kernel; said once a geometry."""


@dataclass(frozen=True)
class ConvolutionCoverageReport:
    """How many pairs each input and each output has; histograms are (pairs, rows)."""

    input_row_count: int
    output_row_count: int
    input_zero_count: int
    input_zero_fraction: float
    input_degree_min: int
    input_degree_max: int
    input_degree_histogram: tuple[tuple[int, int], ...]
    output_zero_count: int
    output_zero_fraction: float
    output_degree_min: int
    output_degree_max: int
    output_degree_histogram: tuple[tuple[int, int], ...]


class Coverage:
    """The report of a plan and that of its transpose, made when one is read."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def of(self, turned: bool) -> ConvolutionCoverageReport:
        return self._turned if turned else self._report

    @cached_property
    def _report(self) -> ConvolutionCoverageReport:
        edges = self._plan.kernel_map
        sides = {"input": (edges.in_rows, edges.num_in), "output": (edges.out_rows, edges.num_out)}
        found: dict[str, Any] = {}
        for side, (rows, count) in sides.items():
            degrees = torch.bincount(rows.long(), minlength=count)
            kinds, counts = (t.tolist() for t in torch.unique(degrees, return_counts=True))
            zero = counts[0] if kinds and kinds[0] == 0 else 0
            found[f"{side}_row_count"], found[f"{side}_zero_count"] = count, zero
            found[f"{side}_zero_fraction"] = zero / count if count else 0.0
            found[f"{side}_degree_min"], found[f"{side}_degree_max"] = (kinds[0], kinds[-1]) if kinds else (0, 0)
            found[f"{side}_degree_histogram"] = tuple(zip(kinds, counts))
        return ConvolutionCoverageReport(**found)

    @cached_property
    def _turned(self) -> ConvolutionCoverageReport:
        other = {"input": "output", "output": "input"}
        found = {}
        for name, value in vars(self._report).items():
            side, _, rest = name.partition("_")
            found[f"{other[side]}_{rest}"] = value
        return ConvolutionCoverageReport(**found)


def warn_of_gaps(geometry: ConvolutionGeometry, stacklevel: int) -> None:
    """Warn, once, of windows that leave voxels out."""
    gaps = [axis for axis, (k, s) in enumerate(zip(geometry.kernel_size, geometry.stride)) if k < s]
    key = tuple(geometry.kernel_size), tuple(geometry.stride)
    if gaps and key not in _WARNED_INCOMPLETE_COVERAGE_GEOMETRIES:
        _WARNED_INCOMPLETE_COVERAGE_GEOMETRIES.add(key)
        warnings.warn(
            f"kernel size {key[0]} with stride {key[1]} leaves uncovered stride residues on the axes {gaps}, as dense "
            "convolution does: some voxels reach no output; acknowledge_incomplete_coverage=True says that it is meant",
            ConvolutionCoverageWarning,
            stacklevel=stacklevel,
        )


# ---- plans


Pairs = Sequence[tuple[int, int]]
Data = TypeVar("Data", torch.Tensor, JaggedTensor)


@dataclass(frozen=True, repr=False)
class ConvolutionPlan:
    """A convolution from one grid to another, in one direction; make it by `from_grid_batch` and its siblings.

    ``plan`` is the `sparseconv.ConvolutionPlan` behind it.

    >>> grid = GridBatch.from_ijk(JaggedTensor(torch.tensor([[0, 0, 0], [0, 0, 1]])))
    >>> plan = ConvolutionPlan.from_grid_batch(2, 2, grid)
    >>> y = plan.execute(torch.ones(2, 4), torch.ones(6, 4, 2, 2, 2))
    >>> back = ConvolutionPlan.from_plan_transposed(plan)
    >>> y.shape, back.execute(y, torch.ones(4, 6, 2, 2, 2)).shape, plan.coverage_report.output_degree_histogram
    (torch.Size([1, 6]), torch.Size([2, 4]), ((2, 1),))
    """

    plan: Plan
    source_grid_batch: GridBatch
    target_grid_batch: GridBatch
    geometry: ConvolutionGeometry
    transform_compatibility: ConvolutionTransformCompatibility
    topology_policy: ConvolutionTopologyPolicy
    topology_provenance: ConvolutionTopologyProvenance
    _channel_pairs: tuple[tuple[int, int], ...]
    _transposed: bool
    _coverage: Coverage
    _turned: bool = False

    @classmethod
    def from_grid_batch(
        cls,
        kernel_size: Any,
        stride: Any,
        source_grid: GridBatch | VoxelGrid,
        target_grid: GridBatch | VoxelGrid | None = None,
        *,
        expert_config: Mapping[str, Any] | None = None,
        channel_pairs: Pairs = (),
        topology_policy: ConvolutionTopologyPolicy | None = None,
        strict_output_coverage: bool = False,
        acknowledge_incomplete_coverage: bool = False,
        _transposed: bool = False,
    ) -> ConvolutionPlan:
        """A convolution from fine voxels to coarse ones.

        Args:
            kernel_size, stride: one whole number or three.
            source_grid: a `GridBatch`, or a `VoxelGrid` in three axes.
            target_grid: of the same kind; default: every voxel that sees an input, at stride 1 too.
            expert_config: ``{"backend": ...}`` by fVDB's names, without effect.
            channel_pairs: the only (C_in, C_out) that the plan takes.
            topology_policy: what ``target_grid`` says already.
            strict_output_coverage: refuse a target some of whose voxels see no input.
            acknowledge_incomplete_coverage: do not warn of windows that leave voxels out.

        Raises:
            ValueError: grids of different lattices, batch sizes or devices, or arguments that contradict each other.
        """
        kernel, step = steps(kernel_size, "kernel_size"), steps(stride, "stride")
        source = _grid("source_grid", source_grid)
        target = None if target_grid is None else _grid("target_grid", target_grid)
        policy = _policy(target, topology_policy)
        _check_backend(expert_config)
        for pair in channel_pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"channel_pairs must be pairs (C_in, C_out); got {pair!r}")
            for count in pair:
                check_count("channels of channel_pairs", count, 1)
        geometry, found = ConvolutionGeometry(kernel, step), None
        if target is None:
            if kernel == step == (1, 1, 1):
                target, found = source, Plan(source.voxel_grid, 1)
            elif _transposed:
                found = Plan.transposed(source.voxel_grid, kernel, stride=step)
            else:
                found = Plan(source.voxel_grid, kernel, stride=step, target="full")
            if target is None:
                target = source.scaled(found.target, step, finer=_transposed)
        found_lattice = compatibility(*((target, source) if _transposed else (source, target)), geometry)
        if not acknowledge_incomplete_coverage:
            warn_of_gaps(geometry, stacklevel=4 if _transposed else 3)
        if found is None:
            make = Plan.transposed if _transposed else Plan
            found = make(source.voxel_grid, kernel, stride=step, target=target.voxel_grid)
        coverage = Coverage(found)
        if strict_output_coverage and policy is ConvolutionTopologyPolicy.RESTRICTED:
            zero = coverage.of(False).output_zero_count
            if zero:
                raise ValueError(f"the target has {zero} zero-degree output rows: voxels that see no input")
        generated = policy is ConvolutionTopologyPolicy.COMPLETE
        provenance = ConvolutionTopologyProvenance["GENERATED" if generated else "EXPLICIT_TARGET"]
        pairs = tuple((into, out) for into, out in channel_pairs)
        return cls(found, source, target, geometry, found_lattice, policy, provenance, pairs, _transposed, coverage)

    @classmethod
    def from_grid_batch_transposed(cls, *args: Any, **named: Any) -> ConvolutionPlan:
        """A convolution from coarse voxels to fine ones; arguments are those of `from_grid_batch`."""
        return cls.from_grid_batch(*args, **named, _transposed=True)

    @classmethod
    def from_plan_transposed(cls, plan: ConvolutionPlan) -> ConvolutionPlan:
        """The same pairs backwards, for weights (C_in, C_out, k0, k1, k2) of the first plan's."""
        check_kind("plan", plan, ConvolutionPlan, "from_grid_batch makes one")
        return replace(
            plan,
            plan=plan.plan.transpose(),
            source_grid_batch=plan.target_grid_batch,
            target_grid_batch=plan.source_grid_batch,
            topology_policy=ConvolutionTopologyPolicy.RESTRICTED,
            topology_provenance=ConvolutionTopologyProvenance.EXACT_TRANSPOSE,
            _channel_pairs=tuple((out, into) for into, out in plan._channel_pairs),
            _transposed=not plan._transposed,
            _turned=not plan._turned,
        )

    def valid_usage(self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any, transposed: bool) -> bool:
        """Whether a layer of these channels, kernel size, stride and direction may run this plan."""
        return (
            self._takes(in_channels, out_channels)
            and list(steps(kernel_size, "kernel_size")) == self.geometry.kernel_size
            and list(steps(stride, "stride")) == self.geometry.stride
            and transposed == self._transposed
        )

    def execute(self, data: Data, weights: torch.Tensor) -> Data:
        """Convolve.

        Args:
            data: rows of the source's voxels, a JaggedTensor; or (N, C_in) where the batch has one item.
            weights: (C_out, C_in, k0, k1, k2), of the direction of the plan; (C_out, C_in) too for one tap.

        Returns:
            Rows of the target's voxels, of the kind of ``data``; differentiable to any order.
        """
        check_kind("data", data, (torch.Tensor, JaggedTensor), "JaggedTensor([features, ...]) makes one of tensors")
        check_values("weights", weights, "(C_out, C_in, k0, k1, k2)")
        kernel: Ints = tuple(self.geometry.kernel_size)
        if weights.ndim == 2 and kernel == (1, 1, 1):
            weights = weights[:, :, None, None, None]
        if weights.ndim != 5 or tuple(weights.shape[2:]) != kernel:
            short = "[C_out, C_in] or " if kernel == (1, 1, 1) else ""
            wanted = ", ".join(["C_out", "C_in", *map(str, kernel)])
            raise ValueError(f"weights must be {short}[{wanted}] here; got {tuple(weights.shape)}")
        if not self._takes(weights.shape[1], weights.shape[0]):
            raise ValueError(
                f"the plan takes the channel pairs {self._channel_pairs}; the weights' is "
                f"({weights.shape[1]}, {weights.shape[0]})"
            )
        weights = weights.flatten(2).permute(2, 1, 0)  # which no other library's layout looks like
        if isinstance(data, torch.Tensor):
            if self.source_grid_batch.grid_count != 1:
                raise ValueError(
                    f"the source has {self.source_grid_batch.grid_count} batch items: give a JaggedTensor of them"
                )
            return self.plan.execute(data, weights)
        if len(data) != self.source_grid_batch.grid_count:
            raise ValueError(f"the source has {self.source_grid_batch.grid_count} batch items; data has {len(data)}")
        data.check_items("the source", self.source_grid_batch.joffsets)
        return self.target_grid_batch.jagged_like(self.plan.execute(data.jdata, weights))

    def _takes(self, in_channels: int, out_channels: int) -> bool:
        return not self._channel_pairs or (in_channels, out_channels) in self._channel_pairs

    @property
    def kernel_size(self) -> torch.Tensor:
        return torch.tensor(self.geometry.kernel_size, dtype=torch.int32)

    @property
    def stride(self) -> torch.Tensor:
        return torch.tensor(self.geometry.stride, dtype=torch.int32)

    @property
    def phase_policy(self) -> ConvolutionPhasePolicy:
        return ConvolutionPhasePolicy.TORCH_SAME_PHASE

    @property
    def coverage_report(self) -> ConvolutionCoverageReport:
        """How many pairs each row has; found once for a plan and its transposes."""
        return self._coverage.of(self._turned)

    @property
    def has_fixed_topology(self) -> bool:
        """Whether outputs are on the inputs' own grid."""
        return self.source_grid_batch.is_same(self.target_grid_batch)

    def __repr__(self) -> str:
        return f"ConvolutionPlan({'transposed, ' if self._transposed else ''}{self.plan})"


def _grid(name: str, grid: GridBatch | VoxelGrid) -> GridBatch:
    if isinstance(grid, VoxelGrid):
        return GridBatch.from_voxel_grid(grid)
    check_kind(name, grid, (GridBatch, VoxelGrid), "GridBatch.from_ijk makes one")
    return grid


def _policy(target: GridBatch | None, policy: ConvolutionTopologyPolicy | None) -> ConvolutionTopologyPolicy:
    complete, restricted = ConvolutionTopologyPolicy
    own = complete if target is None else restricted
    if policy is None:
        return own
    check_kind("topology_policy", policy, ConvolutionTopologyPolicy, "leave it out: target_grid says it already")
    if policy is complete and target is not None:
        raise ValueError("COMPLETE finds the outputs by itself, so it asks for target_grid=None")
    if policy is restricted and target is None:
        raise ValueError("RESTRICTED keeps to given outputs, so it asks for an explicit target_grid")
    return policy


def _check_backend(config: Mapping[str, Any] | None) -> None:
    if config is None:
        return
    check_kind("expert_config", config, Mapping, "leave it out: sparseconv chooses by itself")
    name = config.get("backend", "default")
    if name == "dense":
        raise ValueError("the dense convolution backend is disabled, as in fVDB: leave expert_config out")
    if name not in ("default", "gather_scatter", "pred_gather_igemm"):
        raise ValueError(f"the backend must be default, gather_scatter or pred_gather_igemm; got {name!r}")
