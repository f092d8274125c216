"""Settings of convolutions. Where strided layers place their windows counts; the rest has no effect."""

from __future__ import annotations

from enum import Enum
from typing import Any

from sparseconv.interop.torchsparse.conventions import (
    get_downsample_mode,
    get_kmap_mode,
    set_downsample_mode,
    set_kmap_mode,
)


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
