"""From a trained network and some scenes to its 8-bit copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sparseconv.backends.float8 import FLOAT8
from sparseconv.checks import check_kind
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.quantization.float8 import Float8Builder
from sparseconv.quantization.network import QuantizedNetwork
from sparseconv.quantization.program import Builder
from sparseconv.quantization.recording import Recording
from sparseconv.tensor import SparseTensor

Scene = SparseTensor | tuple[torch.Tensor, torch.Tensor]


def quantize(
    net: torch.nn.Module,
    scenes: Iterable[Scene],
    *,
    dtype: torch.dtype | str = torch.int8,
    keep: Sequence[str] = (),
    percentile: float | None = None,
) -> QuantizedNetwork:
    """An 8-bit copy of a network, calibrated on scenes: int8 weights and activations, int32 sums.

    The network is recorded on a few voxels, and what was recorded runs on every scene once. Norms are folded into the
    convolutions before them; residuals and activations join them. Scales are symmetric: one per output channel for
    weights, one per tensor for activations. The arithmetic is `sparseconv.backends.integers`.

    Args:
        net: takes a `SparseTensor`; in evaluation mode. It stays as it is.
        scenes: `SparseTensor`s, or (coords, features), such as the network will see; some dozens do.
        dtype: ``torch.int8``, or ``torch.float8_e4m3fn`` (``"fp8"``) with sums in fp32: on GPUs of compute capability
            8.9 and later by their matrix units, elsewhere simulated on fp32.
        keep: names of layers or blocks to leave in floating point, as ``net.named_modules()`` has them. ``"first"`` and
            ``"last"`` are the first and the last convolution or linear layer.
        percentile: of the magnitudes in a scene that an activation's scale covers, such as 99.99; larger ones are
            clipped. None: all.

    Returns:
        A `QuantizedNetwork`.

    Raises:
        ValueError: a network in training, no scene with voxels, a network that reads values of rows or goes another way
            for another number of voxels, names that are none, and layers that integers cannot compute, which are named
            for ``keep``. A network that returns, or gives to a kept layer, a grid or tensor of the scene that no layer
            makes. TypeError: scenes that are none.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval()
    >>> small = sc.quantize(net, [x])
    >>> small(x).channels, small.state_dict()["steps.1.weight"].dtype
    (5, torch.int8)
    """
    check_kind("scenes", scenes, Iterable, "pass a list of scenes")
    builder_of = _check(net, dtype, keep, percentile)
    ranges: dict[int, float] = {}

    def seen(value: int, features: torch.Tensor) -> None:
        if features.numel():
            ranges[value] = max(ranges.get(value, 0.0), _magnitude(features, percentile))
        ranges.setdefault(value, 0.0)

    recording: Recording | None = None
    voxels = 0
    wide = {name for name in keep if name not in ("first", "last")}
    for scene in scenes:
        if not isinstance(scene, (SparseTensor, tuple, list)):
            raise TypeError(f"scenes are SparseTensors or pairs (coords, features); got {type(scene).__name__}")
        x = scene if isinstance(scene, SparseTensor) else SparseTensor(VoxelGrid(scene[0]), scene[1])
        voxels += len(x.grid)
        with torch.no_grad():
            if recording is None:
                recording = Recording(net, x, wide)
                ends = _ends(recording, keep)
                recording = Recording(net, x, wide | ends) if ends else recording
            recording.run(x, seen)
    if recording is None or not voxels:
        raise ValueError("calibration needs at least one scene with voxels, to measure the range of numbers")
    builder = builder_of(recording, ranges)
    results = builder.build()
    if builder.failed:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in builder.failed.items())
        names = sorted({name.partition(":")[0] for name in builder.failed} - {""})
        said = f"keep={names} leaves them in floating point" if names else "make modules of them, which keep can name"
        raise ValueError(f"these layers have no integer form; {said}:{lines}")
    return QuantizedNetwork(builder.steps, results).to(x.device)


def _check(net: torch.nn.Module, dtype: Any, keep: Sequence[str], percentile: float | None) -> type[Builder]:
    check_kind("net", net, torch.nn.Module, "pass the network")
    training = [name or type(net).__name__ for name, module in net.named_modules() if module.training]
    if training:
        raise ValueError(f"{training[0]} is in training: call net.eval(), so that norms use their running statistics")
    check_kind("keep", keep, (list, tuple, set, frozenset), "pass a list of names")
    known = {name for name, _ in net.named_modules()} | {"first", "last"}
    missing = [name for name in keep if name not in known or not name]
    if missing:
        raise ValueError(f"keep names {missing}, but the network has no such modules")
    if percentile is not None and not 50 < percentile <= 100:
        raise ValueError(f"percentile is above 50 and at most 100; got {percentile}")
    if dtype in (torch.int8, "int8"):
        return Builder
    if dtype in (FLOAT8, "fp8", "float8_e4m3fn"):
        return Float8Builder
    raise ValueError(f"dtype is torch.int8 or torch.float8_e4m3fn ('fp8'); got {dtype!r}")


def _ends(recording: Recording, keep: Sequence[str]) -> set[str]:
    """The names that "first" and "last" mean."""
    found = [op.name for op in recording.operations if op.kind in ("conv", "linear")]
    return {found[place] for word, place in (("first", 0), ("last", -1)) if word in keep and found}


def _magnitude(features: Any, percentile: float | None) -> float:
    """The largest magnitude, or that below which so many percent lie."""
    values = features.detach().float().abs().flatten()
    if not bool(values.isfinite().all()):
        raise ValueError("the network's results on a scene are not finite, so it cannot be calibrated on that scene")
    if percentile is None or percentile == 100:
        return float(values.max())
    return float(values.kthvalue(max(1, round(len(values) * percentile / 100))).values)
