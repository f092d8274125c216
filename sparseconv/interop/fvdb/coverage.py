"""How many pairs the rows of a plan have."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparseconv.geometry.ranges import Ints
from sparseconv.interop.fvdb.lattices import ConvolutionGeometry
from sparseconv.plan.convolution import ConvolutionPlan as Plan

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


def warn_of_gaps(geometry: ConvolutionGeometry) -> None:
    """Warn, once, of windows that leave voxels out."""
    gaps = [axis for axis, (k, s) in enumerate(zip(geometry.kernel_size, geometry.stride)) if k < s]
    key = tuple(geometry.kernel_size), tuple(geometry.stride)
    if gaps and key not in _WARNED_INCOMPLETE_COVERAGE_GEOMETRIES:
        _WARNED_INCOMPLETE_COVERAGE_GEOMETRIES.add(key)
        warnings.warn(
            f"kernel size {key[0]} with stride {key[1]} leaves uncovered stride residues on the axes {gaps}, as dense "
            "convolution does: some voxels reach no output; acknowledge_incomplete_coverage=True says that it is meant",
            ConvolutionCoverageWarning,
            stacklevel=4,
        )
