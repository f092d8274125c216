"""Public checkpoints of whole models: which of their keys are the network here, and what those are called here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparseconv.interop.checkpoints import Report, State, load, read
from sparseconv.interop.layouts import Layout

if TYPE_CHECKING:
    from jaxtyping import Shaped

#: Pointcept's and OpenPCDet's names of norms and skips -> ours
BLOCK = ((r"\.bn([12])\.", r".norm\1."), (r"\.proj\.", ".downsample."))


@dataclass(frozen=True)
class Published:
    """A family of public checkpoints.

    ``prefix`` is where the network lies among the keys; ``renames`` are (pattern, replacement), each applied in turn.
    """

    network: str  # of sparseconv.nn
    layout: str
    prefix: str
    renames: tuple[tuple[str, str], ...] = ()


PUBLISHED: dict[str, Published] = {
    "minkowski/minkunet": Published("minkunet.MinkUNet", "minkowski", ""),
    "minkowski/resnet": Published("resnet.ResNet", "minkowski", ""),
    "pointcept/spunet": Published("spunet.SpUNet", "spconv", "backbone.", BLOCK),
    "pointcept/ptv3": Published("ptv3.PointTransformerV3", "spconv", "backbone."),
    "pointcept/ptv3-stem": Published("ptv3.PointEmbedding", "spconv", "backbone.embedding."),
    "pointcept/ptv3-cpe": Published(
        "ptv3.ConditionalPositionalEncoding", "spconv", "backbone.enc.enc0.block0.cpe.", ((r"^", "cpe."),)
    ),
    "openpcdet/second": Published("second.SecondEncoder", "spconv", "backbone_3d."),
    "openpcdet/voxelres": Published("second.VoxelResBackBone8x", "spconv", "backbone_3d.", BLOCK),
    "mmdet3d/second": Published(
        "second.SecondEncoder", "spconv", "middle_encoder.", ((r"^encoder_layers\.encoder_layer(\d)\.", r"conv\1."),)
    ),
    "det3d/centerpoint": Published(
        "second.VoxelResBackBone8x",
        "spconv",
        "backbone.",
        (
            (r"^extra_conv\.", "conv_out."),
            (r"^(conv[234])\.([01])\.(?=weight|bias|running|num)", r"\1.0.\2."),
            (r"^(conv[234])\.3\.", r"\1.1."),
            (r"^(conv[234])\.4\.", r"\1.2."),
            *BLOCK,
        ),
    ),
}


def select(state: Mapping[str, torch.Tensor], prefix: str, renames: tuple[tuple[str, str], ...] = ()) -> State:
    """The tensors under a prefix (a leading ``module.`` is passed over), without it, and renamed.

    Raises:
        ValueError: no key has the prefix; some of the keys are named.
    """
    plain = {key.removeprefix("module."): value for key, value in state.items()}
    chosen = {key[len(prefix) :]: value for key, value in plain.items() if key.startswith(prefix)}
    if not chosen:
        some = ", ".join(list(plain)[:6])
        raise ValueError(f"no key begins with {prefix!r}; there are {len(plain)}, such as {some}: give prefix=")
    result: State = {}
    for key, value in chosen.items():
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        if key in result:
            raise ValueError(f"two keys become {key!r}: the checkpoint has other names than this family's")
        result[key] = value
    return result


def load_published(
    network: torch.nn.Module,
    checkpoint: str | Path | Mapping[str, Shaped[torch.Tensor, " ..."]],
    name: str,
    *,
    prefix: str | None = None,
    layout: str | Layout | None = None,
    ignore_classes: Sequence[str] = (),
) -> Report:
    """Load a public checkpoint into a network of `sparseconv.nn`, whole or not at all.

    Args:
        network: of the class and with the arguments that the checkpoint was trained with.
        checkpoint: a file, or tensors by key.
        name: a family in `PUBLISHED`, such as ``"pointcept/spunet"``.
        prefix: where the network lies among the keys, if elsewhere than usual.
        layout: of the weights, if another than usual (files of spconv 1.x are ``"spconv-rsck"``).
        ignore_classes: as `read` takes them.

    Raises:
        ValueError: an unknown family, no key under the prefix, or keys and shapes that do not fit, all named.

    >>> from sparseconv.interop import convert_state
    >>> from sparseconv.nn import MinkUNet
    >>> net = MinkUNet(3, 5)
    >>> theirs, _ = convert_state(net.state_dict(), "sparseconv", "minkowski")
    >>> print(load_published(MinkUNet(3, 5), theirs, "minkowski/minkunet").source)
    minkowski
    """
    if name not in PUBLISHED:
        raise ValueError(f"no family of checkpoints {name!r}; there are {', '.join(PUBLISHED)}")
    family = PUBLISHED[name]
    if isinstance(checkpoint, (str, Path)):
        checkpoint = read(checkpoint, ignore_classes=ignore_classes)
    chosen = select(checkpoint, family.prefix if prefix is None else prefix, family.renames)
    return load(network, chosen, layout or family.layout)
