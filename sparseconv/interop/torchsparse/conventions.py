"""What coordinates mean in a version of torchsparse, and how its strided layers place their outputs."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from sparseconv.interop.arguments import axes


def make_ntuple(x: Any, ndim: int = 3) -> tuple[int, ...]:
    """One integer an axis, from one for all or a sequence of them."""
    return tuple(axes(x, ndim, "sizes"))


class Version(Enum):
    """Two conventions.

    ``LAST``, of versions 1.4 and 2.0: coordinates (x, y, z, batch), multiples of the stride. ``FIRST``, of version 2.1:
    coordinates (batch, x, y, z), in units of the stride.
    """

    LAST = "2.0"
    FIRST = "2.1"


class _Settings:
    version = Version.LAST if os.getenv("SPARSECONV_TORCHSPARSE", "2.1") in ("1.4", "2.0") else Version.FIRST
    negative = False
    kmap_mode = "hashmap_on_the_fly"
    downsample_mode = "spconv"


def set_version(version: str) -> None:
    """Take coordinates as a version of torchsparse does: ``"1.4"``, ``"2.0"`` or ``"2.1"``, the default.

    The environment's ``SPARSECONV_TORCHSPARSE`` sets it, too.
    """
    if version not in ("1.4", "2.0", "2.1"):
        raise ValueError(f"version must be '1.4', '2.0' or '2.1'; got {version!r}")
    _Settings.version = Version.FIRST if version == "2.1" else Version.LAST


def get_version() -> Version:
    """The convention that coordinates follow."""
    return _Settings.version


def get_allow_negative_coordinates() -> bool:
    """Whether strided layers keep outputs below 0."""
    return _Settings.negative


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Let strided layers keep outputs below 0, which they otherwise leave out, as in torchsparse 2.1."""
    _Settings.negative = allow_negative_coordinates


def get_kmap_mode() -> str:
    """How strided layers place their windows, see `set_kmap_mode`."""
    return _Settings.kmap_mode


def set_kmap_mode(kmap_mode: str) -> None:
    """``"hashmap_on_the_fly"``: windows begin at -padding, as in a dense array. ``"hashmap"``: they are centred."""
    _Settings.kmap_mode = check_kmap_mode(kmap_mode)


def check_kmap_mode(kmap_mode: str) -> str:
    """The mode, where there is such a one."""
    if kmap_mode not in ("hashmap_on_the_fly", "hashmap"):
        raise ValueError(f"kmap_mode must be 'hashmap_on_the_fly' or 'hashmap'; got {kmap_mode!r}")
    return kmap_mode


def get_downsample_mode() -> str:
    """Where outputs of strided layers lie under ``"hashmap"``, see `set_downsample_mode`."""
    return _Settings.downsample_mode


def set_downsample_mode(downsample_mode: str) -> None:
    """``"spconv"``: every voxel that a window reaches. ``"minkowski"``: floor(c / stride)."""
    _Settings.downsample_mode = check_downsample_mode(downsample_mode)


def check_downsample_mode(downsample_mode: str) -> str:
    """The mode, where there is such a one."""
    if downsample_mode not in ("spconv", "minkowski"):
        raise ValueError(f"downsample_mode must be 'spconv' or 'minkowski'; got {downsample_mode!r}")
    return downsample_mode
