"""Public checkpoints of whole models: which of their keys are the network here, and what those are called here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparseconv.interop.checkpoints import Report, State, load, read
from sparseconv.interop.files import some
from sparseconv.interop.layouts import Layout

if TYPE_CHECKING:
    from jaxtyping import Shaped

#: Pointcept's and OpenPCDet's names of norms and skips -> ours
BLOCK = ((r"\.bn([12])\.", r".norm\1."), (r"\.proj\.", ".downsample."))


@dataclass(frozen=True)
class Published:
    """A family of public checkpoints.

    ``prefix`` is where the network lies among the keys; ``renames`` are (pattern, replacement), each applied in turn.
    ``sign`` is a key that files of the family have, and every key of the network matches ``keys``; parts of a network
    have neither.
    """

    network: str  # of sparseconv.nn
    layout: str
    prefix: str
    renames: tuple[tuple[str, str], ...] = ()
    sign: str = ""
    keys: str = ""


#: layers of blocks with skips
RESIDUAL = r"(conv|bn|norm)[123](\.bn)?|(downsample|proj)\.[01](\.bn)?"

PUBLISHED: dict[str, Published] = {
    "minkowski/minkunet": Published(
        "minkunet.MinkUNet", "minkowski", "", sign="convtr7p2s2.kernel",
        keys=rf"(conv(tr)?\d+p\d+s\d+|bn(tr)?\d+(\.bn)?|final|block\d+\.\d+\.({RESIDUAL}))",
    ),
    "minkowski/resnet": Published(
        "resnet.ResNet", "minkowski", "", sign="layer4.0.conv1.kernel",
        keys=rf"(conv[15]|bn[15](\.bn)?|final(\.linear)?|layer\d\.\d+\.({RESIDUAL}))",
    ),
    "pointcept/spunet": Published(
        "spunet.SpUNet", "spconv", "backbone.", BLOCK, sign="enc.0.block0.conv1.weight",
        keys=rf"(conv_input\.[01]|(down|up)\.\d\.[01]|(enc|dec)\.\d\.block\d+\.({RESIDUAL})|final)",
    ),
    "pointcept/ptv3": Published(
        "ptv3.PointTransformerV3", "spconv", "backbone.", sign="enc.enc0.block0.attn.qkv.weight",
        keys=r"embedding\.(stem\.(conv|linear|norm)|mask_token)|(enc\.enc|dec\.dec)\d+\.(up|down|block\d+)\."
        r"(cpe\.[012]|norm[12]?(\.0)?|attn\.(qkv|proj|rope|rpe)|mlp\.0\.fc[12]|ls[12]\.0|proj(_skip)?(\.[01])?)",
    ),
    "pointcept/ptv3-stem": Published("ptv3.PointEmbedding", "spconv", "backbone.embedding."),
    "pointcept/ptv3-cpe": Published(
        "ptv3.ConditionalPositionalEncoding", "spconv", "backbone.enc.enc0.block0.cpe.", ((r"^", "cpe."),)
    ),
    "openpcdet/second": Published(
        "second.SecondEncoder", "spconv", "backbone_3d.", sign="conv4.2.0.weight",
        keys=r"(conv_input|conv1\.0|conv[234]\.[012]|conv_out)\.[01]",
    ),
    "openpcdet/voxelres": Published(
        "second.VoxelResBackBone8x", "spconv", "backbone_3d.", BLOCK, sign="conv4.2.conv1.weight",
        keys=rf"(conv_input|conv[234]\.0|conv_out)\.[01]|conv[1-4]\.\d\.({RESIDUAL})",
    ),
    "mmdet3d/second": Published(
        "second.SecondEncoder", "spconv", "middle_encoder.",
        ((r"^encoder_layers\.encoder_layer(\d)\.", r"conv\1."),), sign="encoder_layers.encoder_layer4.2.0.weight",
        keys=r"(conv_input|encoder_layers\.encoder_layer(1\.0|[234]\.[012])|conv_out)\.[01]",
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
        sign="conv4.4.conv1.weight",
        keys=rf"(conv_input|conv[234]|extra_conv)\.[01]|conv[1-4]\.\d\.({RESIDUAL})",
    ),
}  # fmt: skip
"""Families of published networks by name, such as ``pointcept/spunet``, for `load_published`."""


def published_family(state: Mapping[str, Shaped[torch.Tensor, " ..."]]) -> tuple[str, str]:
    """Which family of `PUBLISHED` a checkpoint is of, by its keys, and the prefix of the network among them.

    Raises:
        ValueError: no family has such keys; some of them are named.

    >>> keys = [f"module.backbone_3d.{key}" for key in ("conv_input.0.weight", "conv4.2.0.weight")]
    >>> published_family({key: torch.zeros(1) for key in keys} | {"module.dense_head.conv_box.weight": torch.zeros(1)})
    ('openpcdet/second', 'module.backbone_3d.')
    """
    for name, family in PUBLISHED.items():
        pattern = re.compile(rf"({family.keys})(\.[a-z_]+)?")
        for key in state if family.sign else ():
            prefix = key[: -len(family.sign)]
            if key.endswith(family.sign) and (not prefix or prefix.endswith(".")):
                own = (other[len(prefix) :] for other in state if other.startswith(prefix))
                if all(pattern.fullmatch(other) for other in own):
                    return name, prefix
    families = ", ".join(name for name, family in PUBLISHED.items() if family.sign)
    raise ValueError(f"the keys are of no family there is ({families}): {some(list(state))}")


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
    name: str | None = None,
    *,
    prefix: str | None = None,
    layout: str | Layout | None = None,
    ignore_classes: Sequence[str] = (),
) -> Report:
    """Load a public checkpoint into a network of `sparseconv.nn`, whole or not at all.

    Args:
        network: of the class and with the arguments that the checkpoint was trained with.
        checkpoint: a file, or tensors by key.
        name: a family in `PUBLISHED`, such as ``"pointcept/spunet"``; default: found by the keys, and the prefix too.
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
    if name is not None and name not in PUBLISHED:
        raise ValueError(f"no family of checkpoints {name!r}; there are {', '.join(PUBLISHED)}")
    if isinstance(checkpoint, (str, Path)):
        checkpoint = read(checkpoint, ignore_classes=ignore_classes)
    if name is None:
        name, found = published_family(checkpoint)
        prefix = found.removeprefix("module.") if prefix is None else prefix
    family = PUBLISHED[name]
    chosen = select(checkpoint, family.prefix if prefix is None else prefix, family.renames)
    return load(network, chosen, layout or family.layout)
