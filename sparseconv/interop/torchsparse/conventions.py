"""What coordinates mean in a version of torchsparse, and how strided layers place their outputs; settings of layers."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from sparseconv.checks import check_choice
from sparseconv.interop.arguments import axes

KMAP_MODES = ("hashmap_on_the_fly", "hashmap")
DOWNSAMPLE_MODES = ("spconv", "minkowski")


def make_ntuple(x: Any, ndim: int = 3) -> tuple[int, ...]:
    """One integer per axis, from one for all or a sequence of them."""
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
    check_choice("version", version, ("1.4", "2.0", "2.1"))
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
    """``"hashmap_on_the_fly"``: windows begin at -padding, as in a dense array. ``"hashmap"``: they are centered."""
    check_choice("kmap_mode", kmap_mode, KMAP_MODES)
    _Settings.kmap_mode = kmap_mode


def get_downsample_mode() -> str:
    """Where outputs of strided layers lie under ``"hashmap"``, see `set_downsample_mode`."""
    return _Settings.downsample_mode


def set_downsample_mode(downsample_mode: str) -> None:
    """``"spconv"``: every voxel that a window reaches. ``"minkowski"``: floor(c / stride)."""
    check_choice("downsample_mode", downsample_mode, DOWNSAMPLE_MODES)
    _Settings.downsample_mode = downsample_mode


# ---- ``torchsparse.nn.functional.conv.conv_config``


class Dataflow(Enum):
    """Accepted, without effect: the backend is chosen by sparseconv."""

    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvConfig(dict):
    """A dictionary whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


class _Global:
    config: ConvConfig | None = None


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> ConvConfig:
    """The settings that layers have; ``kmap_mode`` and ``downsample_mode`` count, the others have no effect."""
    return ConvConfig(
        dataflow=Dataflow.ImplicitGEMM,
        ifsort=False,
        kmap_mode=get_kmap_mode(),
        downsample_mode=get_downsample_mode(),
        split_mask_num=1,
        split_mask_num_bwd=3,
        epsilon=0.0,
        mm_thresh=0,
        FOD_fusion=True,
    )


def get_global_conv_config() -> ConvConfig | None:
    """The settings that were set for all layers, if any were."""
    return _Global.config


def set_global_conv_config(conv_config: Any) -> None:
    """Set ``kmap_mode`` and ``downsample_mode`` for all layers; see `set_kmap_mode` and `set_downsample_mode`."""
    _Global.config = conv_config
    set_kmap_mode(conv_config.get("kmap_mode", get_kmap_mode()))
    set_downsample_mode(conv_config.get("downsample_mode", get_downsample_mode()))


def clear_global_conv_config() -> None:
    """Go back to torchsparse's own settings."""
    _Global.config = None
    set_kmap_mode("hashmap_on_the_fly")
    set_downsample_mode("spconv")
