"""How a plan came by its edges."""

from __future__ import annotations

from enum import Enum


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
