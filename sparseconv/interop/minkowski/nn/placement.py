"""Where the output of a layer lies."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.arguments import no_batch
from sparseconv.interop.arguments import settled
from sparseconv.interop.minkowski.coordinate_map import divided
from sparseconv.interop.minkowski.kernel_generator import KernelGenerator
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor
from sparseconv.interop.minkowski.traced import same
from sparseconv.kinds import described

#: coordinates that a layer is given for its output: (M, 1+D), a key of the same manager, or a tensor with one
Place = torch.Tensor | CoordinateMapKey | SparseTensor


def check_input(input: Any, dimension: int | None) -> None:
    """Raise unless a layer of so many axes, or of any, can take this."""
    if not isinstance(input, SparseTensor):
        raise TypeError(f"the layer takes a SparseTensor of MinkowskiEngine's, not {described(input)}")
    if dimension not in (None, input.D):
        advice = f". {no_batch(input.D)}" if dimension == input.D + 1 else ""
        raise ValueError(f"the layer has dimension={dimension}; the input has {input.D} axes{advice}")


def place_key(
    input: SparseTensor, manager: Any, coordinates: Place | None, kernel: KernelGenerator, transposed: bool = False
) -> CoordinateMapKey | None:
    """The key of given coordinates, which lie at the output's tensor stride; None where there are none."""
    if coordinates is None or isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        if not same(coordinates.coordinate_manager, manager):
            raise ValueError("the tensor whose coordinates the output takes has another coordinate manager")
        return coordinates.key
    if not isinstance(coordinates, torch.Tensor):
        raise TypeError(
            f"coordinates must be a tensor (M, 1+D), a CoordinateMapKey or a SparseTensor; got {coordinates!r}"
        )
    own, steps = input.tensor_stride, settled(kernel.kernel_stride)
    stride = divided(own, steps) if transposed else [t * s for t, s in zip(own, steps)]
    return manager.insert_and_map(coordinates, stride)[0]


def ends(
    key: CoordinateMapKey,
    out_key: CoordinateMapKey | None,
    manager: Any,
    kernel: KernelGenerator,
    transposed: bool = False,
    expand: bool = False,
) -> CoordinateMapKey:
    """The key of a layer's output: the one given, set to the voxels that the kernel reaches where it was not."""
    if out_key is not None and out_key.is_key_set():
        return out_key
    reached = manager.reached(key, kernel, transposed, expand)
    if out_key is None:
        return reached
    out_key.set_key(*reached.get_key())
    return out_key
